package node

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ferry.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLayersAreLaidOverOneAnother(t *testing.T) {
	file := writeFile(t, `
socket: /run/a.sock
side_channel: 127.0.0.1:7000
region_mode: 0640
checksums: true
planes: [tcp]
allow_hosts: 10.0.0.0/8, node-1
hold_share: 0.25
grant_source_share: 0.125
ec_cpu_bytes: 64MiB
model: m
vllm_version: "0.10"
block_bytes: 2KiB
timeouts:
  read: 5s
  item: 90s
`)
	env := []string{"FERRY_SIDE_CHANNEL=127.0.0.1:7001", "FERRY_TIMEOUTS_READ=6s", "FERRY_MODEL=n", "FERRY_PORT=tcp://10.0.0.1:80", "PATH=/bin",
		"VLLM_EC_SIDE_CHANNEL_PORT=7009", "FERRY_PLANES=mapped,tcp", "FERRY_HOLD_SHARE=", "FERRY_TIMEOUTS_ITEM="}
	flags := map[string]string{"timeouts.read": "7s", "dtype": "torch.float16", "consumer_ack_timeout_s": "1.5", "slots": "9", "grant_total_share": "1"}
	got, err := Load(file, env, flags)
	if err != nil {
		t.Fatal(err)
	}
	want := DefaultConfig()
	want.Socket, want.SideChannel, want.ModeText, want.Checksums = "/run/a.sock", "127.0.0.1:7001", "0640", true
	want.Planes, want.AllowHosts, want.HoldShare = []string{"mapped", "tcp"}, []string{"10.0.0.0/8", "node-1"}, 0.25
	want.SourceShare, want.TotalShare = 0.125, 1
	want.Timeouts.Read, want.Timeouts.Item, want.Timeouts.AckPlain = 7*time.Second, 90*time.Second, 1500*time.Millisecond
	want.Pools = []PoolConfig{{ECCPUBytes: "64MiB", Model: "n", Dtype: "torch.float16", BlockBytes: 2048, VLLMVersion: "0.10", Slots: 9}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestVLLMsSideChannelVariablesCount(t *testing.T) {
	for _, c := range []struct {
		env  []string
		want string
	}{
		{nil, "127.0.0.1:5601"},
		{[]string{"VLLM_EC_SIDE_CHANNEL_HOST=10.0.0.5"}, "10.0.0.5:5601"},
		{[]string{"VLLM_EC_SIDE_CHANNEL_PORT=7000"}, "127.0.0.1:7000"},
		{[]string{"VLLM_EC_SIDE_CHANNEL_HOST=::1", "VLLM_EC_SIDE_CHANNEL_PORT=7000"}, "[::1]:7000"},
		{[]string{"VLLM_EC_SIDE_CHANNEL_PORT=7000", "FERRY_SIDE_CHANNEL=127.0.0.1:1"}, "127.0.0.1:1"},
	} {
		got, err := Load("", c.env, nil)
		if err != nil || got.SideChannel != c.want {
			t.Errorf("%v: %q, %v; want %q", c.env, got.SideChannel, err, c.want)
		}
	}
}

func TestSeveralPoolsAreAListInTheFile(t *testing.T) {
	file := writeFile(t, `
pools:
  - {ec_cpu_bytes: 1MiB, model: a, dtype: torch.bfloat16, block_bytes: 2048, vllm_version: 0.32.0}
  - {ec_cpu_bytes: 2097152, model: b, dtype: torch.bfloat16, block_bytes: 2048, vllm_version: 0.32.0}
`)
	got, err := Load(file, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Pools) != 2 || got.Pools[1].ECCPUBytes != "2097152" || got.Pools[1].Model != "b" {
		t.Errorf("%+v", got.Pools)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
	if _, err := Load(file, nil, map[string]string{"model": "c"}); err == nil || !strings.Contains(err.Error(), "2 pools") {
		t.Errorf("a flag for one of two pools: %v", err)
	}
}

func TestWhatCannotBeReadIsNamedWithItsKeyValueAndFix(t *testing.T) {
	for _, c := range []struct {
		name, file string
		env        []string
		flags      map[string]string
		want       []string // all in the error
	}{
		{name: "unknown key", file: "sidechannel: x", want: []string{"sidechannel", "unknown key", "did you mean side_channel"}},
		{name: "unknown nested key", file: "timeouts: {reed: 5s}", want: []string{"timeouts.reed", "did you mean timeouts.read"}},
		{name: "unknown key of a pool", file: "pools: [{modle: m}]", want: []string{"pools[0].modle", "did you mean model"}},
		{name: "unknown flag", flags: map[string]string{"sockt": "x"}, want: []string{"sockt", "did you mean socket"}},
		{name: "vLLM's switch for NIXL", file: "ec_enable_nixl: true", want: []string{"ec_enable_nixl", "planes: [nixl]"}},
		{name: "vLLM's dead key", file: "num_ec_blocks: 5", want: []string{"num_ec_blocks", "ec_cpu_bytes"}},
		{name: "no number", file: "ec_protocol: two", want: []string{"ec_protocol", `"two"`, "whole number"}},
		{name: "no bool", env: []string{"FERRY_CHECKSUMS=perhaps"}, want: []string{"FERRY_CHECKSUMS", "checksums", `"perhaps"`, "true or false"}},
		{name: "no duration", file: "timeouts: {read: 5}", want: []string{"timeouts.read", `"5"`, "unit"}},
		{name: "no float", file: "hold_share: half", want: []string{"hold_share", `"half"`, "number"}},
		{name: "a share of nothing", file: "grant_total_share: 0", want: []string{"grant_total_share", `"0"`, "above 0 and at most 1, or leave the key out"}},
		{name: "a share of nothing in the environment", env: []string{"FERRY_HOLD_SHARE=0.0"}, want: []string{"hold_share", `"0.0"`, "above 0"}},
		{name: "no wait at all", file: "timeouts: {adopt: 0s}", want: []string{"timeouts.adopt", `"0s"`, "1ms to 24h, or leave the key out"}},
		{name: "no wait at all, without a unit", flags: map[string]string{"timeouts.read": "0"}, want: []string{"timeouts.read", `"0"`, "1ms"}},
		{name: "no size", flags: map[string]string{"block_bytes": "2 bananas"}, want: []string{"block_bytes", "2 bananas", "KiB"}},
		{name: "no seconds", flags: map[string]string{"consumer_ack_timeout_s": "-1"}, want: []string{"consumer_ack_timeout_s", "-1", "seconds"}},
		{name: "a version that lost its zero", file: "vllm_version: 0.10", want: []string{"vllm_version", "0.1", "quotes"}},
		{name: "no value", file: "socket:", want: []string{"socket", "value"}},
		{name: "a list for one", file: "socket: [a]", want: []string{"socket", "[a]", "one value"}},
		{name: "a map for one", file: "socket: {a: b}", want: []string{"socket.a", "unknown"}},
		{name: "a list with a hole", file: "planes: [mapped, '']", want: []string{"planes", "names"}},
		{name: "pools that are no list", file: "pools: 5", want: []string{"pools", "5", "list"}},
		{name: "a pool that is no map", file: "pools: [5]", want: []string{"pools[0]", "5"}},
		{name: "pools twice", file: "model: m\npools: [{model: n}]", want: []string{"model", "m", "pools"}},
		{name: "a key twice", file: "model: m\nmodel: n", want: []string{"model", "already defined"}},
		{name: "not YAML", file: "{", want: []string{"ferry.yaml"}},
		{
			name: "several, everywhere", file: "hold_share: abc\nnonsense: 1\ntimeouts: {read: 3}\ntrusted_network: maybe\npools: [{modle: m, slots: x}, 5]",
			env: []string{"FERRY_CHECKSUMS=perhaps", "FERRY_DATA_PORT=x"}, flags: map[string]string{"timeouts.idle": "20", "ec_protocol": "two"},
			want: []string{"hold_share", "nonsense", "timeouts.read", "trusted_network", "pools[0].modle", "pools[0].slots", "pools[1]", "FERRY_CHECKSUMS", "FERRY_DATA_PORT", "timeouts.idle", "ec_protocol"},
		},
	} {
		path := ""
		if c.file != "" {
			path = writeFile(t, c.file)
		}
		_, err := Load(path, c.env, c.flags)
		if !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v; want ErrConfig", c.name, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", c.name, err, w)
			}
		}
	}
	if _, err := Load("/no/such/file.yaml", nil, nil); !errors.Is(err, os.ErrNotExist) || !errors.Is(err, ErrConfig) {
		t.Errorf("a file that is not there: %v", err)
	}
}

func TestWhatIsImpossibleIsNamedWithItsKeyValueAndFix(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   []string // all in the error; nil: it is fine
	}{
		{"the test's own", func(*Config) {}, nil},
		{"no socket", func(c *Config) { c.Socket = "" }, []string{"socket", "path"}},
		{"a long socket", func(c *Config) { c.Socket = "/" + strings.Repeat("s", maxSocketPath) }, []string{"socket", "108 bytes", "at most 107"}},
		{"the longest socket", func(c *Config) { c.Socket = "/" + strings.Repeat("s", maxSocketPath-1) }, nil},
		{"a path for an instance", func(c *Config) { c.Instance = "a/b" }, []string{"instance", `"a/b"`, "A-Z"}},
		{"a rank below 0", func(c *Config) { c.Rank = -1 }, []string{"dp_rank", "-1"}},
		{"no tmpfs", func(c *Config) { c.ShmDir = "/no/such" }, []string{"shm_dir", "/no/such", "tmpfs"}},
		{"a mode that is no octal", func(c *Config) { c.ModeText = "0888" }, []string{"region_mode", "0888", "octal"}},
		{"a mode to run it", func(c *Config) { c.ModeText = "0777" }, []string{"region_mode", "0777", "octal"}},
		{"a mode that the owner cannot use", func(c *Config) { c.ModeText = "0400" }, []string{"region_mode", "0400", "0600"}},
		{"a mode that all can write", func(c *Config) { c.ModeText = "0666" }, []string{"region_mode", "0666", "anybody"}},
		{"a group's mode", func(c *Config) { c.ModeText = "0640" }, nil},
		{"no port", func(c *Config) { c.SideChannel = "127.0.0.1" }, []string{"side_channel", "127.0.0.1", "HOST:PORT"}},
		{"no host", func(c *Config) { c.SideChannel = ":5601" }, []string{"side_channel", ":5601", "host"}},
		{"a large port", func(c *Config) { c.SideChannel = "127.0.0.1:65536" }, []string{"side_channel", "65536", "65535"}},
		// C92: a socket bound to all interfaces.
		{"all interfaces", func(c *Config) { c.SideChannel = "0.0.0.0:0" }, []string{"side_channel", "0.0.0.0:0", "trusted_network"}},
		{"a network", func(c *Config) { c.SideChannel = "10.0.0.1:0" }, []string{"side_channel", "10.0.0.1:0", "trusted_network"}},
		{"a trusted network", func(c *Config) { c.SideChannel, c.Trusted = "10.0.0.1:0", true }, nil},
		{"IPv6 loopback", func(c *Config) { c.SideChannel = "[::1]:0" }, nil},
		{"localhost", func(c *Config) { c.SideChannel = "localhost:0" }, nil},
		{"another loopback", func(c *Config) { c.SideChannel = "127.0.0.7:0" }, nil},
		// C75: the side channel's host left at localhost, so the node talked to itself.
		{"loopback told to others", func(c *Config) { c.SideChannel, c.Trusted, c.Advertise = "10.0.0.1:0", true, "localhost" },
			[]string{"advertise_host", "localhost", "10.0.0.1:0", "asks itself"}},
		{"nothing to tell others", func(c *Config) { c.SideChannel, c.Trusted = "0.0.0.0:0", true }, []string{"advertise_host", "0.0.0.0:0"}},
		{"all interfaces told to others", func(c *Config) { c.SideChannel, c.Trusted, c.Advertise = "0.0.0.0:0", true, "0.0.0.0" }, []string{"advertise_host", "0.0.0.0"}},
		{"all interfaces, one told", func(c *Config) { c.SideChannel, c.Trusted, c.Advertise = "0.0.0.0:0", true, "node-1.example" }, nil},
		{"a port told to others", func(c *Config) { c.Advertise = "node-1:80" }, []string{"advertise_host", "node-1:80", "without a port"}},
		{"a data port too large", func(c *Config) { c.DataPort = 70000 }, []string{"data_port", "70000"}},
		{"admin for all", func(c *Config) { c.Admin = "0.0.0.0:0" }, []string{"admin", "0.0.0.0:0", "trusted_network"}},
		{"no admin", func(c *Config) { c.Admin = AdminOff }, nil},
		{"a strange host allowed", func(c *Config) { c.AllowHosts = []string{"a b"} }, []string{"allow_hosts", "a b", "10.0.0.0/8"}},
		{"protocol 0", func(c *Config) { c.ECProtocol = 0 }, []string{"ec_protocol", "0", "1 or 2"}},
		{"protocol 3", func(c *Config) { c.ECProtocol = 3 }, []string{"ec_protocol", "3", "1 or 2"}},
		{"a plane that does not exist", func(c *Config) { c.Planes = []string{"rdma"} }, []string{"planes", "rdma", "mapped"}},
		{"a plane twice", func(c *Config) { c.Planes = []string{"tcp", "tcp"} }, []string{"planes", "tcp", "twice"}},
		{"a share over 1", func(c *Config) { c.HoldShare = 1.5 }, []string{"hold_share", "1.5"}},
		{"a share of less than nothing", func(c *Config) { c.SourceShare = -1 }, []string{"grant_source_share", "-1"}},
		{"a share of no size", func(c *Config) { c.TotalShare = math.NaN() }, []string{"grant_total_share", "NaN"}},
		{"a policy that there is none of", func(c *Config) { c.Eviction = "lru" }, []string{"eviction", "lru", "sieve"}},
		{"a wait below 0", func(c *Config) { c.Timeouts.Read = -time.Second }, []string{"timeouts.read", "-1s", "1ms"}},
		{"a wait of two days", func(c *Config) { c.Timeouts.Item = 48 * time.Hour }, []string{"timeouts.item", "48h", "24h"}},
		{"no pool", func(c *Config) { c.Pools = nil }, []string{"pools", "ec_cpu_bytes"}},
		{"no size", func(c *Config) { c.Pools[0].ECCPUBytes = "" }, []string{"ec_cpu_bytes", "64MiB"}},
		{"a size that is none", func(c *Config) { c.Pools[0].ECCPUBytes = "much" }, []string{"ec_cpu_bytes", "much"}},
		{"less than a block", func(c *Config) { c.Pools[0].ECCPUBytes = "2047" }, []string{"ec_cpu_bytes", "2047", "2048"}},
		{"one block and a bit", func(c *Config) { c.Pools[0].ECCPUBytes = "2049" }, nil},
		{"no block", func(c *Config) { c.Pools[0].BlockBytes = 0 }, []string{"block_bytes", "0", "width"}},
		{"a block of half elements", func(c *Config) { c.Pools[0].BlockBytes = 2047 }, []string{"block_bytes", "2047", "elements"}},
		{"no model", func(c *Config) { c.Pools[0].Model = "" }, []string{"model"}},
		{"no version", func(c *Config) { c.Pools[0].VLLMVersion = "" }, []string{"vllm_version", "0.32.0"}},
		{"an unknown dtype", func(c *Config) { c.Pools[0].Dtype = "torch.float7" }, []string{"dtype", "torch.float7"}},
		{"a dtype without its prefix", func(c *Config) { c.Pools[0].Dtype = "bfloat16" }, []string{"dtype: bfloat16", "torch.bfloat16"}},
		{"slots below 0", func(c *Config) { c.Pools[0].Slots = -1 }, []string{"slots", "-1"}},
		{"one pool twice", func(c *Config) { c.Pools = append(c.Pools, c.Pools[0]) }, []string{"pools[1].model", "pools[0]"}},
		{"two things", func(c *Config) { c.Instance, c.ECProtocol = "a/b", 3 }, []string{"instance", "ec_protocol"}},
	} {
		cfg := DefaultConfig()
		cfg.Socket, cfg.ShmDir = "/tmp/s", t.TempDir()
		cfg.Pools = []PoolConfig{{ECCPUBytes: "1MiB", Model: "m", Dtype: "torch.bfloat16", BlockBytes: 2048, VLLMVersion: "0.32.0"}}
		c.change(&cfg)
		err := cfg.Validate()
		if c.want == nil {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		if !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v; want ErrConfig", c.name, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", c.name, err, w)
			}
		}
	}
}

// C10: a region's name that nobody could set, so that no two processes could share it.
func TestTheInstanceFollowsFromTheSocketsPath(t *testing.T) {
	instance := func(socket string, rank int) string {
		cfg := DefaultConfig()
		cfg.Socket, cfg.Rank = socket, rank
		cfg.Pools = []PoolConfig{{ECCPUBytes: "1MiB", Model: "m", Dtype: "torch.bfloat16", BlockBytes: 2048, VLLMVersion: "0.32.0"}}
		s, err := cfg.check()
		if err != nil {
			t.Fatal(err)
		}
		return s.Instance
	}
	t.Chdir("/tmp")
	if a, b := instance("/tmp/a.sock", 0), instance("a.sock", 0); a != b {
		t.Errorf("one socket, two instances: %s, %s", a, b)
	}
	if a, b := instance("/tmp/a.sock", 0), instance("/tmp/b.sock", 0); a == b {
		t.Errorf("two sockets, one instance: %s", a)
	}
}

func TestSizesAreRead(t *testing.T) {
	for _, c := range []struct {
		text string
		want int64 // 0: an error
	}{
		{"1", 1}, {"67108864", 64 << 20}, {"64MiB", 64 << 20}, {"64 mib", 64 << 20}, {" 1GB ", 1e9}, {"1.5GiB", 3 << 29}, {"2kB", 2000},
		{"0.5KiB", 512}, {"1TiB", 1 << 40}, {"1TB", 1e12}, {"5b", 5}, {"9223372036854775807", 1<<63 - 1},
		{"", 0}, {"0", 0}, {"-1", 0}, {"MiB", 0}, {"1.5", 0}, {"1e6", 0}, {"1/2MiB", 0}, {"1..5MiB", 0}, {"0x10", 0}, {"1PiB", 0},
		{"9223372036854775808", 0}, {"99999999999TiB", 0}, {"64M", 0}, {"1 2", 0}, {".", 0}, {strings.Repeat("9", 100), 0},
	} {
		got, err := ParseBytes(c.text)
		if got != c.want || (err == nil) != (c.want != 0) {
			t.Errorf("ParseBytes(%q) = %d, %v; want %d", c.text, got, err, c.want)
		}
	}
}

// C34: a client that sets the host others connect to.
func TestOnlyAllowedHostsAreConnectedTo(t *testing.T) {
	l, err := newHostList([]string{"10.0.0.0/8", "192.168.1.7", "Node-1", "fd00::/8"})
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"10.1.2.3": true, "::ffff:10.1.2.3": true, "192.168.1.7": true, "node-1": true, "fd00::1": true,
		"11.0.0.1": false, "192.168.1.8": false, "node-2": false, "node-1.evil": false, "169.254.169.254": false, "fe80::1": false, "": false,
	} {
		if got := l.allow(host) == nil; got != want {
			t.Errorf("allow(%q) = %v", host, got)
		}
	}
	var none *hostList
	if err := none.allow("anything"); err != nil {
		t.Error(err)
	}
}

func TestDocumentationHasEveryKey(t *testing.T) {
	doc, err := os.ReadFile("../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range Keys() {
		for _, want := range []string{"`" + key + "`", EnvName(key)} {
			if key != ackTimeoutKey && !strings.Contains(string(doc), want) {
				t.Errorf("docs/configuration.md does not have %s", want)
			}
		}
	}
	for _, d := range descs {
		name, _, _ := strings.Cut(strings.TrimPrefix(d.String(), `Desc{fqName: "`), `"`)
		if !strings.Contains(string(doc), "`"+name+"`") {
			t.Errorf("docs/configuration.md does not have the metric %s", name)
		}
	}
}
