package deploy

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/transfer"
)

// Kind of a connector: what both ends of an edge speak.
type Kind string

// The connectors that a stage of ours can use.
const (
	NIXL         Kind = "NixlConnector"         // vLLM-Omni's, or ours as its peer
	SharedMemory Kind = "SharedMemoryConnector" // the same, on one machine
	Ferry        Kind = "FerryConnector"        // ours on both ends: NIXL's settings, and planes
)

var kinds = []Kind{NIXL, SharedMemory, Ferry}

// Defaults of a connector, which are vLLM-Omni's.
const (
	DefaultBasePort      = 50051
	DefaultBackend       = "UCX"
	DefaultThreads       = 4
	DefaultLease         = time.Hour
	DefaultTransfer      = 300 * time.Second
	DefaultPoll          = time.Millisecond
	DefaultHandshake     = 5 * time.Second
	DefaultMetadataQuery = 10 * time.Millisecond

	defaultSenderHost = "127.0.0.1"
)

// The environment variables that count over the file.
const (
	envLease    = "VLLM_OMNI_NIXL_LEASE_S"
	envTransfer = "VLLM_OMNI_NIXL_XFER_TIMEOUT_S"
)

const (
	roleSender   = "sender"
	roleReceiver = "receiver"
	maxThreads   = 1024
)

// Settings of one end of an edge. Those of a SharedMemory edge are Kind and Connector alone. Slices are not to be changed.
type Settings struct {
	Kind          Kind
	Connector     string        // its name in the file; "" for an edge that only edges: has
	Backends      []string      // NIXL's, at least one
	Planes        []string      // data planes by preference, of a Ferry; nil: all that are there
	MemoryType    string        // "DRAM" or "VRAM" for all tensors; "": by their device
	ReceiveDevice string        // where received tensors go, "cpu" or "cuda:1"; "": the producer's kind of device
	Threads       int           // of UCX; other backends have no such setting
	Lease         time.Duration // how long an unclaimed payload is kept, from its put
	Transfer      time.Duration // how long a READ may take
	Poll          time.Duration // between two looks at a READ
	Handshake     time.Duration // for a reply of the control plane
	MetadataQuery time.Duration // for the reply to one query, at most Handshake by default
}

// connector is an entry of connectors:, or what stands in its place at an edge.
type connector struct {
	at
	kind string // as the file has it
	Settings
	role       string // "sender", "receiver" or ""
	host       string // "": detect
	hostGiven  bool
	base       int // of the port; 0: any free one
	baseGiven  bool
	senderHost string
	senderPort int // 0: computed
	outgoing   *outgoing
}

// wired is true of what has sockets: all of ours but shared memory.
func (c *connector) wired() bool { return c.Kind == NIXL || c.Kind == Ferry }

// outgoing is where a stage that receives also publishes, though the file has no edge for it.
type outgoing struct {
	host      string
	base      int
	baseGiven bool
	from, to  int // -1: not said
}

// setter reads one key of extra.
type setter func(*parser, *connector, at)

var nixlKeys = map[string]setter{
	"host":            func(p *parser, c *connector, v at) { c.host, c.hostGiven = p.host(v, true) },
	"zmq_port":        func(p *parser, c *connector, v at) { c.base, c.baseGiven = p.integer(v, 0, math.MaxUint16) },
	"sender_host":     func(p *parser, c *connector, v at) { c.senderHost, _ = p.host(v, false) },
	"sender_zmq_port": func(p *parser, c *connector, v at) { c.senderPort, _ = p.integer(v, 1, math.MaxUint16) },
	"backends":        (*parser).backends,
	"num_threads":     func(p *parser, c *connector, v at) { c.Threads, _ = p.integer(v, 1, maxThreads) },
	"receive_device":  (*parser).receiveDevice,
	"memory_type":     (*parser).memoryType,
	"role":            (*parser).role,
	"outgoing":        (*parser).outgoing,

	"lease_seconds":             func(p *parser, c *connector, v at) { c.Lease, _ = p.seconds(v) },
	"transfer_timeout_s":        func(p *parser, c *connector, v at) { c.Transfer, _ = p.seconds(v) },
	"poll_interval_s":           func(p *parser, c *connector, v at) { c.Poll, _ = p.seconds(v) },
	"handshake_timeout_ms":      func(p *parser, c *connector, v at) { c.Handshake, _ = p.milliseconds(v) },
	"metadata_query_timeout_ms": func(p *parser, c *connector, v at) { c.MetadataQuery, _ = p.milliseconds(v) },
}

var ferryKeys = func() map[string]setter {
	all := maps.Clone(nixlKeys)
	all["planes"] = (*parser).planes
	return all
}()

// decided are keys of extra that vLLM-Omni sets itself for each worker, or that change nothing: what a file says there does not count.
var decided = []string{"stage_id", "from_stage", "to_stage", "agent_name", "handshake_max_wait_s", "handshake_retry_s"}

var (
	backendName = regexp.MustCompile(`^[A-Za-z0-9_]{1,64}$`)
	planeName   = regexp.MustCompile(`^(` + transfer.Mapped + `|` + transfer.NIXL + `|` + transfer.TCP + `)$`)
	deviceName  = regexp.MustCompile(`^[a-z]{1,32}(:[0-9]{1,4})?$`)
)

// connector reads an entry. What is wrong with it is an error at once, used or not. Of a kind that is not ours nothing is looked at,
// and only a stage that uses it is refused, since the other stages may be somebody else's.
func (p *parser) connector(v at, label string) *connector {
	c := &connector{at: v, base: DefaultBasePort}
	if !v.mapping() {
		p.fail(v.bad("give a name and, if need be, extra"))
		return c
	}
	for _, f := range v.each() {
		switch f.name {
		case "name", "extra":
		default:
			p.unknown(f, []string{"name", "extra"})
		}
	}
	if f, ok := v.field("name"); !ok {
		p.fail(v.bad("give its name, such as %s", NIXL))
	} else {
		c.kind, _ = p.text(f)
	}
	c.Settings = Settings{Kind: Kind(c.kind), Connector: label}
	extra, ok := v.field("extra")
	if ok && !extra.null() && !extra.mapping() {
		p.fail(extra.bad("give keys and values"))
		return c
	}
	if c.wired() {
		p.extra(c, extra)
	}
	return c
}

// extra reads the settings of a connector. Those of shared memory are the models' only, and theirs may stand in every connector.
func (p *parser) extra(c *connector, extra at) {
	known := nixlKeys
	if c.Kind == Ferry {
		known = ferryKeys
	}
	c.Threads, c.Lease, c.Transfer, c.Poll, c.Handshake = DefaultThreads, DefaultLease, DefaultTransfer, DefaultPoll, DefaultHandshake
	if extra.node != nil {
		for _, f := range extra.each() {
			set, ours := known[f.name]
			switch {
			case ours && f.null():
				p.fail(f.bad("give a value, or leave the key out"))
			case ours:
				set(p, c, f)
			case slices.Contains(decided, f.name) || slices.Contains(modelKeys, f.name):
			default:
				p.unknown(f, slices.Sorted(maps.Keys(known)))
			}
		}
		if f, ok := extra.field("num_threads"); ok && c.Backends != nil && !slices.Equal(c.Backends, []string{DefaultBackend}) {
			p.warning(f, "counts for UCX alone")
		}
	}
	if c.Backends == nil {
		c.Backends = []string{DefaultBackend}
	}
	if c.MetadataQuery == 0 {
		c.MetadataQuery = min(c.Handshake, DefaultMetadataQuery)
	}
	for _, e := range []struct {
		name string
		to   *time.Duration
	}{{envLease, &c.Lease}, {envTransfer, &c.Transfer}} {
		text, _ := p.env(e.name)
		if text == "" {
			continue
		}
		v := at{&node{file: "environment", scalar: text}, e.name, e.name}
		n, err := strconv.ParseFloat(strings.TrimSpace(text), 64) // a $ is no reference here
		if err != nil {
			p.fail(v.bad("give a number of seconds"))
			continue
		}
		v.scalar = n
		*e.to, _ = p.seconds(v)
	}
}

// host reads a host. Where it may be detected, "" is the answer if it shall be.
func (p *parser) host(v at, detect bool) (host string, given bool) {
	host, ok := p.text(v)
	switch {
	case !ok:
		return "", false
	case isAuto(host) && detect:
		return "", true
	case isAuto(host):
		p.fail(v.bad("consumers connect to it: name the producer's host, or leave it out"))
		return "", false
	case !hostname.Valid(host) || hostname.Unspecified(host):
		p.fail(v.bad("give a host name or an IP address without a port, or \"auto\" to detect it"))
		return "", false
	}
	return host, true
}

// names reads a list of names, or one name.
func (p *parser) names(v at, valid *regexp.Regexp, what string) []string {
	items := []at{v}
	if v.list {
		items = nil
		for i, n := range v.items {
			items = append(items, at{node: n, key: fmt.Sprintf("%s[%d]", v.key, i)})
		}
	}
	var all []string
	for _, item := range items {
		name, ok := p.text(item)
		switch {
		case !ok:
		case !valid.MatchString(name):
			p.fail(item.bad("give %s", what))
		case slices.Contains(all, name):
			p.fail(item.bad("it stands twice"))
		default:
			all = append(all, name)
		}
	}
	if len(items) == 0 {
		p.fail(v.bad("give %s, or leave it out", what))
	}
	return all
}

func (p *parser) backends(c *connector, v at) {
	c.Backends = p.names(v, backendName, "NIXL backends, such as [UCX]")
}

func (p *parser) planes(c *connector, v at) {
	c.Planes = p.names(v, planeName, fmt.Sprintf("planes of %s, %s, %s", transfer.Mapped, transfer.NIXL, transfer.TCP))
}

func (p *parser) receiveDevice(c *connector, v at) {
	s, ok := p.text(v)
	if ok && !deviceName.MatchString(s) {
		p.fail(v.bad("give a device as torch names it, such as cpu or cuda:0"))
	}
	c.ReceiveDevice = s
}

func (p *parser) memoryType(c *connector, v at) {
	s, ok := p.text(v)
	switch strings.ToUpper(s) {
	case "DRAM", "VRAM":
		c.MemoryType = strings.ToUpper(s)
	default:
		if ok {
			p.fail(v.bad("give DRAM or VRAM, or leave it out: then each tensor's device decides"))
		}
	}
}

func (p *parser) role(c *connector, v at) {
	s, ok := p.text(v)
	switch s = strings.ToLower(s); s {
	case roleSender, roleReceiver:
		c.role = s
	case "auto":
	default:
		if ok {
			p.fail(v.bad("give %s or %s, or leave it out: an edge says who sends", roleSender, roleReceiver))
		}
	}
}

func (p *parser) outgoing(c *connector, v at) {
	if !v.mapping() {
		p.fail(v.bad("give host and zmq_port of what a middle stage publishes"))
		return
	}
	o := &outgoing{base: DefaultBasePort, from: -1, to: -1}
	for _, f := range v.each() {
		switch f.name {
		case "host":
			o.host, _ = p.host(f, true)
		case "zmq_port":
			o.base, o.baseGiven = p.integer(f, 0, math.MaxUint16)
		case "from_stage":
			o.from, _ = p.integer(f, 0, stageStride-1)
		case "to_stage":
			o.to, _ = p.integer(f, 0, math.MaxInt32)
		default:
			p.unknown(f, []string{"host", "zmq_port", "from_stage", "to_stage"})
		}
	}
	c.outgoing = o
}
