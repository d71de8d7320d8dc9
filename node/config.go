package node

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// ErrConfig is wrapped by every error about the configuration. The text names the key, the value and what to do.
var ErrConfig = errors.New("configuration")

// Defaults of a node. The side channel's are vLLM's (VLLM_EC_SIDE_CHANNEL_HOST / _PORT).
const (
	DefaultSideChannel = "127.0.0.1:5601"
	DefaultAdmin       = "127.0.0.1:5602"
	DefaultShmDir      = "/dev/shm"
	DefaultRegionMode  = "0600"
	DefaultAdopt       = 5 * time.Minute

	// AdminOff as Config.Admin: no admin HTTP.
	AdminOff = "off"
)

// maxSocketPath is sun_path less its closing NUL.
const maxSocketPath = 107

// Config of a node: file (YAML), environment and flags are laid over the defaults in that order. See docs/configuration.md. A zero share or
// wait of a Config made in Go means the default; Load takes none.
type Config struct {
	Instance    string        `koanf:"instance"`       // "": a hash of the socket's path
	Socket      string        `koanf:"socket"`         // path of the engine API's unix socket
	SideChannel string        `koanf:"side_channel"`   // HOST:PORT for peers, port 0 = any
	Advertise   string        `koanf:"advertise_host"` // host written into announcements; "": the side channel's
	DataPort    int           `koanf:"data_port"`      // of the tcp plane, on the side channel's host; 0 = any
	Admin       string        `koanf:"admin"`          // HOST:PORT, or "off"
	ShmDir      string        `koanf:"shm_dir"`        // where the region files go
	Mode        fs.FileMode   `koanf:"-"`              // ModeText once it is checked; set without it, it counts
	ModeText    string        `koanf:"region_mode"`    // octal, "0600"
	KeepRegion  bool          `koanf:"keep_region"`    // leave the region files at a clean end
	Planes      []string      `koanf:"planes"`         // by preference; nil: all that are there
	ECProtocol  int           `koanf:"ec_protocol"`    // generation that plain peers speak, 1 or 2
	Rank        int           `koanf:"dp_rank"`        // data-parallel rank, part of the region's name
	Trusted     bool          `koanf:"trusted_network"`
	AllowHosts  []string      `koanf:"allow_hosts"` // hosts or CIDRs that announcements may name; empty: any
	Checksums   bool          `koanf:"checksums"`   // keep and verify xxh3 of every entry
	Pools       []PoolConfig  `koanf:"pools"`       // one pool: its keys may stand at the top level instead
	Timeouts    TimeoutConfig `koanf:"timeouts"`
	NIXL        NIXLConfig    `koanf:"nixl"`
	HoldShare   float64       `koanf:"hold_share"`         // part of a pool that announced entries may keep from eviction; 0: ec.DefaultHoldShare
	Eviction    string        `koanf:"eviction"`           // ec.PolicyFIFO or ec.PolicySIEVE
	SourceShare float64       `koanf:"grant_source_share"` // part of a pool that one address may have under grants; 0: ec.DefaultSourceShare
	TotalShare  float64       `koanf:"grant_total_share"`  // part of a pool that all peers together may; 0: ec.DefaultTotalShare
	EngineShare float64       `koanf:"engine_share"`       // part of a pool that one process of engines may have reserved; 0: 1, all of it
}

// PoolConfig describes one pool: what its engines agree on.
type PoolConfig struct {
	ECCPUBytes  string `koanf:"ec_cpu_bytes"` // "64MiB" or bytes
	Model       string `koanf:"model"`
	Dtype       string `koanf:"dtype"`
	BlockBytes  int64  `koanf:"block_bytes"`
	VLLMVersion string `koanf:"vllm_version"`
	Slots       int    `koanf:"slots"` // entries at most; 0: region.DefaultSlots of the blocks
}

// NIXLConfig is about the nixl plane.
type NIXLConfig struct {
	Library   string   `koanf:"library"`    // path of libnixl_capi.so; "": where it is found
	Backends  []string `koanf:"backends"`   // NIXL's plugins; nil: UCX
	Params    []string `koanf:"params"`     // of the backends: KEY=VALUE for all, BACKEND.KEY=VALUE for one
	InProcess bool     `koanf:"in_process"` // agents run in the node's own process, which ends if UCX crashes
	// AgentCommand starts an agent process (see transfer/nixl); without it, agents run in this process.
	AgentCommand []string `koanf:"-"`
}

// TimeoutConfig holds every wait of a node. Zero: the default of ec.Timeouts or ec.CacheOptions.
type TimeoutConfig struct {
	AckOwn     time.Duration `koanf:"ack_own"`
	AckPlain   time.Duration `koanf:"ack_plain"` // also consumer_ack_timeout_s
	Connect    time.Duration `koanf:"connect"`
	Read       time.Duration `koanf:"read"`
	Quarantine time.Duration `koanf:"quarantine"`
	Item       time.Duration `koanf:"item"`
	GrantLease time.Duration `koanf:"grant_lease"`
	PlainLease time.Duration `koanf:"plain_lease"`
	HoldLease  time.Duration `koanf:"hold_lease"`
	Adopt      time.Duration `koanf:"adopt"` // a dead node's regions wait so long for its restart
	Idle       time.Duration `koanf:"idle"`
}

// DefaultConfig is what a node does where nobody says otherwise. It has no pool.
func DefaultConfig() Config {
	t := ec.Timeouts{}.WithDefaults()
	return Config{
		Socket:      defaultSocket(),
		SideChannel: DefaultSideChannel,
		Admin:       DefaultAdmin,
		ShmDir:      DefaultShmDir,
		ModeText:    DefaultRegionMode,
		ECProtocol:  wire.Generation2,
		HoldShare:   ec.DefaultHoldShare,
		Eviction:    ec.PolicyFIFO,
		SourceShare: ec.DefaultSourceShare,
		TotalShare:  ec.DefaultTotalShare,
		EngineShare: 1,
		Timeouts: TimeoutConfig{
			AckOwn: t.AckOwn, AckPlain: t.AckPlain, Connect: t.Connect, Read: t.Read, Quarantine: t.Quarantine,
			Item: t.Item, GrantLease: t.GrantLease, PlainLease: t.PlainLease, HoldLease: ec.DefaultHoldLease, Idle: t.Idle, Adopt: DefaultAdopt,
		},
	}
}

// defaultSocket is in the user's runtime directory, or names the user in the shared temporary one.
func defaultSocket() string {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "ferry.sock")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("ferry-%d.sock", os.Getuid()))
}

// bad makes an error about one key. What the format wraps is wrapped.
func bad(key string, value any, format string, a ...any) error {
	return fmt.Errorf("%w: %s: %v: %w", ErrConfig, key, value, fmt.Errorf(format, a...))
}

// What to do about a value of which there are several.
const (
	shareFix = "give a part of the pool, above 0 and at most 1, or leave the key out"
	waitFix  = "give 1ms to 24h, or leave the key out"
)

// quoted shows a value that may be empty.
func quoted(s string) string { return strconv.Quote(s) }

var instanceName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// settings is a Config that is checked and taken apart.
type settings struct {
	Config
	socket    string // absolute
	host      string // side channel
	port      int
	advertise string
	adminHost string
	adminPort int
	hosts     *hostList
	pools     []poolSettings
	backends  []nixl.Backend
}

type poolSettings struct {
	PoolConfig
	compat   wire.Compat
	blocks   int
	itemSize int
}

// Validate says what is wrong with the configuration, all at once. Start does the same.
func (c Config) Validate() error {
	_, err := c.check()
	return err
}

func (c Config) check() (*settings, error) {
	s := &settings{Config: c}
	err := errors.Join(s.checkIdentity(), s.checkRegion(), s.checkAddresses(), s.checkWords(), s.checkTimes(), s.checkNIXL(), s.checkPools())
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (s *settings) checkIdentity() error {
	if s.Socket == "" {
		return bad("socket", quoted(""), "give the path of the unix socket for engines")
	}
	abs, err := filepath.Abs(s.Socket)
	if err != nil {
		return bad("socket", s.Socket, "%w; give an absolute path", err)
	}
	s.socket = abs
	if len(abs) > maxSocketPath {
		return bad("socket", abs, "%d bytes, a unix socket's path has at most %d; use a shorter directory", len(abs), maxSocketPath)
	}
	if s.Instance == "" {
		sum := sha256.Sum256([]byte(abs))
		s.Instance = hex.EncodeToString(sum[:6])
	}
	if !instanceName.MatchString(s.Instance) {
		return bad("instance", quoted(s.Instance), "use 1 to 64 of A-Z a-z 0-9 . _ -")
	}
	if s.Rank < 0 || s.Rank > math.MaxUint16 {
		return bad("dp_rank", s.Rank, "give 0 to %d", math.MaxUint16)
	}
	return nil
}

func (s *settings) checkRegion() error {
	var errs []error
	if s.ShmDir == "" {
		s.ShmDir = DefaultShmDir
	}
	if st, err := os.Stat(s.ShmDir); err != nil {
		errs = append(errs, bad("shm_dir", s.ShmDir, "%w; name a directory on a tmpfs", err))
	} else if !st.IsDir() {
		errs = append(errs, bad("shm_dir", s.ShmDir, "not a directory; name one on a tmpfs"))
	}
	switch mode, err := strconv.ParseUint(s.ModeText, 8, 32); {
	case s.ModeText == "" && s.Mode == 0:
		s.Mode = 0o600
	case s.ModeText == "":
	case err != nil || mode&^0o666 != 0:
		errs = append(errs, bad("region_mode", quoted(s.ModeText), "give permission bits in octal, to read and write only, such as 0600"))
		s.Mode = 0o600 // which has nothing more to say
	default:
		s.Mode = fs.FileMode(mode)
	}
	if s.Mode&0o600 != 0o600 {
		errs = append(errs, bad("region_mode", fmt.Sprintf("%#o", s.Mode), "the owner needs to read and write: 0600, or 0640 to let a group read"))
	}
	if s.Mode&0o002 != 0 {
		errs = append(errs, bad("region_mode", fmt.Sprintf("%#o", s.Mode), "anybody on the machine could change encodings: take the last 2 away"))
	}
	for _, share := range []struct {
		key string
		v   *float64
		def float64
	}{
		{"hold_share", &s.HoldShare, ec.DefaultHoldShare},
		{"grant_source_share", &s.SourceShare, ec.DefaultSourceShare},
		{"grant_total_share", &s.TotalShare, ec.DefaultTotalShare},
		{"engine_share", &s.EngineShare, 1},
	} {
		if *share.v == 0 {
			*share.v = share.def
		}
		if !(*share.v > 0 && *share.v <= 1) { // NaN too
			errs = append(errs, bad(share.key, *share.v, shareFix))
		}
	}
	switch s.Eviction {
	case "", ec.PolicyFIFO, ec.PolicySIEVE: // "": of a Config that was not made from the defaults
	default:
		errs = append(errs, bad("eviction", quoted(s.Eviction), "give %s or %s", ec.PolicyFIFO, ec.PolicySIEVE))
	}
	return errors.Join(errs...)
}

func (s *settings) checkAddresses() error {
	var errs []error
	if s.SideChannel == "" {
		s.SideChannel = DefaultSideChannel
	}
	var err error
	if s.host, s.port, err = splitAddress("side_channel", s.SideChannel); err != nil {
		errs = append(errs, err)
	} else {
		errs = append(errs, s.checkSideChannel())
	}
	if s.DataPort < 0 || s.DataPort > math.MaxUint16 {
		errs = append(errs, bad("data_port", s.DataPort, "0 (any free port) to 65535"))
	}
	switch {
	case s.Admin == "":
		s.Admin = DefaultAdmin
		fallthrough
	default:
		if s.adminHost, s.adminPort, err = splitAddress("admin", s.Admin); err != nil {
			errs = append(errs, err)
		} else if !hostname.Loopback(s.adminHost) && !s.Trusted {
			errs = append(errs, bad("admin", s.Admin, "not loopback: metrics and keys would be open to the network; use 127.0.0.1, or set trusted_network: true"))
		}
	case s.Admin == AdminOff:
	}
	if s.hosts, err = newHostList(s.AllowHosts); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (s *settings) checkSideChannel() error {
	if !hostname.Loopback(s.host) && !s.Trusted {
		return bad("side_channel", s.SideChannel, "not loopback: peers are not authenticated, so anybody who can connect can read this node's encodings; set trusted_network: true if the network is yours, or use 127.0.0.1")
	}
	s.advertise = s.Advertise
	if s.advertise == "" {
		if hostname.Unspecified(s.host) {
			return bad("advertise_host", quoted(""), "side_channel %s listens on all addresses, and peers need one to connect to: set advertise_host", s.SideChannel)
		}
		s.advertise = s.host
	}
	switch {
	case !hostname.Valid(s.advertise):
		return bad("advertise_host", quoted(s.advertise), "give a host name or an IP address, without a port")
	case hostname.Unspecified(s.advertise):
		return bad("advertise_host", s.advertise, "peers cannot connect to it: give an address of this machine")
	case hostname.Loopback(s.advertise) && !hostname.Loopback(s.host):
		return bad("advertise_host", s.advertise, "a peer that is told %s asks itself, while side_channel listens on %s: give an address of this machine", s.advertise, s.SideChannel)
	}
	return nil
}

func (s *settings) checkWords() error {
	var errs []error
	if s.ECProtocol != wire.Generation1 && s.ECProtocol != wire.Generation2 {
		errs = append(errs, bad("ec_protocol", s.ECProtocol, "1 or 2: the EC_CONNECTOR_VERSION of the vLLM peers"))
	}
	seen := map[string]bool{}
	for _, p := range s.Planes {
		if _, known := planeMakers[p]; !known {
			errs = append(errs, bad("planes", p, "no such plane; known are %s", planeNames()))
		}
		if seen[p] {
			errs = append(errs, bad("planes", p, "named twice"))
		}
		seen[p] = true
	}
	return errors.Join(errs...)
}

func (s *settings) checkTimes() error {
	var errs []error
	d := DefaultConfig().Timeouts
	for _, t := range []struct {
		key string
		v   *time.Duration
		def time.Duration
	}{
		{"ack_own", &s.Timeouts.AckOwn, d.AckOwn},
		{"ack_plain", &s.Timeouts.AckPlain, d.AckPlain},
		{"connect", &s.Timeouts.Connect, d.Connect},
		{"read", &s.Timeouts.Read, d.Read},
		{"quarantine", &s.Timeouts.Quarantine, d.Quarantine},
		{"item", &s.Timeouts.Item, d.Item},
		{"grant_lease", &s.Timeouts.GrantLease, d.GrantLease},
		{"plain_lease", &s.Timeouts.PlainLease, d.PlainLease},
		{"hold_lease", &s.Timeouts.HoldLease, d.HoldLease},
		{"adopt", &s.Timeouts.Adopt, d.Adopt},
		{"idle", &s.Timeouts.Idle, d.Idle},
	} {
		if *t.v == 0 {
			*t.v = t.def
		}
		if *t.v < time.Millisecond || *t.v > 24*time.Hour {
			errs = append(errs, bad("timeouts."+t.key, *t.v, waitFix))
		}
	}
	return errors.Join(errs...)
}

func (s *settings) checkPools() error {
	if len(s.Pools) == 0 {
		return bad("pools", "none", "describe a pool: ec_cpu_bytes, model, dtype, block_bytes, vllm_version")
	}
	var errs []error
	seen := map[string]int{}
	for i, p := range s.Pools {
		at := ""
		if len(s.Pools) > 1 {
			at = fmt.Sprintf("pools[%d].", i)
		}
		ps, err := p.check(at)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		h := ps.compat.Hash()
		if j, twice := seen[h]; twice {
			errs = append(errs, bad(at+"model", p.Model, "the same model, dtype, block_bytes and vllm_version as pools[%d]: make it one pool", j))
		}
		seen[h] = i
		s.pools = append(s.pools, *ps)
	}
	return errors.Join(errs...)
}

func (p PoolConfig) check(at string) (*poolSettings, error) {
	var errs []error
	for _, f := range []struct{ key, v, hint string }{
		{"ec_cpu_bytes", p.ECCPUBytes, "give the pool's size, such as 64MiB"},
		{"model", p.Model, "give the model's name as the engines do"},
		{"dtype", p.Dtype, "give the encodings' dtype as torch prints it, such as torch.bfloat16"},
		{"vllm_version", p.VLLMVersion, "give the engines' vLLM version, such as 0.32.0; it is part of what peers compare"},
	} {
		if f.v == "" {
			errs = append(errs, bad(at+f.key, quoted(""), "%s", f.hint))
		}
	}
	ps := &poolSettings{
		PoolConfig: p,
		compat:     wire.Compat{VLLMVersion: p.VLLMVersion, Model: p.Model, Dtype: p.Dtype, BlockBytes: p.BlockBytes},
	}
	var err error
	if p.Dtype != "" {
		// The compatibility hash is over the name itself: without its prefix it would match no peer's.
		switch ps.itemSize, err = ec.ItemSize(p.Dtype); {
		case err != nil:
			errs = append(errs, bad(at+"dtype", p.Dtype, "%w", err))
		case !strings.HasPrefix(p.Dtype, "torch."):
			errs = append(errs, bad(at+"dtype", p.Dtype, "peers compare the name as torch prints it: give torch.%s", p.Dtype))
		}
	}
	switch {
	case p.BlockBytes <= 0:
		errs = append(errs, bad(at+"block_bytes", p.BlockBytes, "give the bytes of a block: the language model's embedding width x bytes of an element"))
	case ps.itemSize > 0 && p.BlockBytes%int64(ps.itemSize) != 0:
		errs = append(errs, bad(at+"block_bytes", p.BlockBytes, "not whole elements of %s, %d bytes each", p.Dtype, ps.itemSize))
	}
	if p.Slots < 0 {
		errs = append(errs, bad(at+"slots", p.Slots, "give the entries that the pool can hold, or 0 for a quarter of the blocks, 4,096 to 262,144"))
	}
	if p.ECCPUBytes != "" && p.BlockBytes > 0 {
		size, err := ParseBytes(p.ECCPUBytes)
		switch blocks := size / p.BlockBytes; {
		case err != nil:
			errs = append(errs, bad(at+"ec_cpu_bytes", p.ECCPUBytes, "%w", err))
		case blocks < 1:
			errs = append(errs, bad(at+"ec_cpu_bytes", p.ECCPUBytes, "smaller than one block of %d bytes", p.BlockBytes))
		case blocks > math.MaxInt32:
			errs = append(errs, bad(at+"ec_cpu_bytes", p.ECCPUBytes, "%d blocks, at most %d", blocks, math.MaxInt32))
		default:
			ps.blocks = int(blocks)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return ps, nil
}

// splitAddress reads HOST:PORT.
func splitAddress(key, value string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(value)
	if err != nil {
		return "", 0, bad(key, quoted(value), "give HOST:PORT, such as 127.0.0.1:0 for any free port")
	}
	if !hostname.Valid(host) {
		return "", 0, bad(key, quoted(value), "give a host name or an IP address before the port, such as 127.0.0.1")
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, bad(key, quoted(value), "the port is 0 (any free one) to 65535")
	}
	return host, int(n), nil
}
