package node

import (
	"io/fs"
	"time"
)

// Config of a node: file (YAML), environment and flags are laid over the defaults in that order. See docs/configuration.md.
type Config struct {
	Instance    string        `koanf:"instance"`       // "": a hash of the socket's path
	Socket      string        `koanf:"socket"`         // path of the engine API's unix socket
	SideChannel string        `koanf:"side_channel"`   // HOST:PORT for peers, port 0 = any
	Advertise   string        `koanf:"advertise_host"` // host written into announcements; "": the side channel's
	Admin       string        `koanf:"admin"`          // HOST:PORT
	ShmDir      string        `koanf:"shm_dir"`
	Mode        fs.FileMode   `koanf:"-"`
	ModeText    string        `koanf:"region_mode"` // octal, "0600"
	KeepRegion  bool          `koanf:"keep_region"`
	Planes      []string      `koanf:"planes"`      // nil: all that are there
	ECProtocol  int           `koanf:"ec_protocol"` // 1 or 2
	Rank        int           `koanf:"dp_rank"`
	Trusted     bool          `koanf:"trusted_network"` // needed to listen off loopback
	AllowHosts  []string      `koanf:"allow_hosts"`     // hosts or CIDRs that announcements may name; empty: any
	Checksums   bool          `koanf:"checksums"`       // keep and verify xxh3 of every entry
	Pools       []PoolConfig  `koanf:"pools"`           // one pool: may be given by flags instead
	Timeouts    TimeoutConfig `koanf:"timeouts"`
	HoldShare   float64       `koanf:"hold_share"`
}

// PoolConfig describes one pool: what its engines agree on.
type PoolConfig struct {
	ECCPUBytes  string `koanf:"ec_cpu_bytes"` // "64MiB" or bytes
	Model       string `koanf:"model"`
	Dtype       string `koanf:"dtype"`
	BlockBytes  int64  `koanf:"block_bytes"`
	VLLMVersion string `koanf:"vllm_version"`
	Slots       int    `koanf:"slots"`
}

// TimeoutConfig holds every wait of a node.
type TimeoutConfig struct {
	AckOwn     time.Duration `koanf:"ack_own"`
	AckPlain   time.Duration `koanf:"ack_plain"` // also consumer_ack_timeout_s
	Read       time.Duration `koanf:"read"`
	Quarantine time.Duration `koanf:"quarantine"`
	Item       time.Duration `koanf:"item"`
	GrantLease time.Duration `koanf:"grant_lease"`
	HoldLease  time.Duration `koanf:"hold_lease"`
}
