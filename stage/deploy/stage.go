package deploy

import (
	"fmt"
	"net"
	"slices"
	"strconv"
)

// Stage is what one worker of a stage does with its neighbours. A producer has Outgoing edges, a consumer Incoming ones, a stage in
// the middle both.
type Stage struct {
	ID       int
	Place    Place
	Incoming []Incoming
	Outgoing []Outgoing
	Warnings []Warning // besides those of the deployment
}

// Endpoint is a host, without a port or brackets, and a port.
type Endpoint struct {
	Host string
	Port int
}

func (e Endpoint) String() string { return net.JoinHostPort(e.Host, strconv.Itoa(e.Port)) }

// Incoming is an edge that the stage receives on.
type Incoming struct {
	From int
	Settings
	// Sender is where the producer of the same replica and rank is asked, unless a request names another endpoint: that goes first.
	// Port 0: only a request knows. Of a SharedMemory edge it is zero.
	Sender Endpoint
}

// Outgoing is an edge that the stage publishes on.
type Outgoing struct {
	To int // -1: the file does not say
	Settings
	// Bind is where the worker listens, and what it publishes as its endpoint. Port 0: any free one, which is then published. Edges
	// with the same Bind share a listener. Of a SharedMemory edge it is zero.
	Bind Endpoint
	// AnyPort says that the file has no zmq_port: Bind.Port is then where unmodified peers look that have no endpoint from a request,
	// and if it is taken any free port will do for all others.
	AnyPort bool
}

// Stage gives the edges of a worker: of stage id, at a place. Hosts that are left to detection are detected now. Errors: ErrNoStage,
// and *Error that wraps ErrConnector, ErrPort, or ErrConfig for a role that is not the edge's.
func (d *Deployment) Stage(id int, p Place) (*Stage, error) {
	if _, err := d.info(id); err != nil {
		return nil, err
	}
	if problem := p.problem(); problem != "" {
		return nil, fmt.Errorf("%w: %s", ErrPort, problem)
	}
	s := &Stage{ID: id, Place: p}
	hosts := &hosts{detect: d.detect}
	for _, e := range d.edges {
		if e.to != id && e.from != id {
			continue
		}
		if err := e.usable(id); err != nil {
			return nil, err
		}
		if e.from == id {
			if !e.wired() { // the others are below
				s.Outgoing = append(s.Outgoing, Outgoing{To: e.to, Settings: e.Settings})
			}
			continue
		}
		in := Incoming{From: e.from, Settings: e.Settings}
		if e.wired() {
			port, err := e.sender(p)
			if err != nil {
				return nil, err
			}
			in.Sender = Endpoint{e.senderHostOr(hosts), port}
		}
		s.Incoming = append(s.Incoming, in)
	}
	for _, b := range d.binds(id) {
		port, err := b.c.port(b.base, b.from, p)
		if err != nil {
			return nil, err
		}
		out := Outgoing{To: b.to, Settings: b.c.Settings, Bind: Endpoint{hosts.or(b.c, b.host), port}, AnyPort: !b.baseGiven}
		if d.others && !remote(out.Bind.Host) {
			const text = "consumers elsewhere that are told this ask themselves: set host to an address of this machine"
			s.Warnings = append(s.Warnings, b.c.hostWarning(out.Bind.Host, text))
		}
		s.Outgoing = append(s.Outgoing, out)
	}
	s.Warnings = append(s.Warnings, hosts.warnings...)
	slices.SortFunc(s.Incoming, func(a, b Incoming) int { return a.From - b.From })
	slices.SortFunc(s.Outgoing, func(a, b Outgoing) int { return a.To - b.To })
	return s, nil
}

// usable says whether stage id can have the edge.
func (e edge) usable(id int) error {
	if !slices.Contains(kinds, e.Kind) {
		v, ok := e.field("name")
		if !ok {
			v = e.at
		}
		return v.fail(ErrConnector, "stage %d uses it, on edge %d to %d; give %s, %s or %s", id, e.from, e.to, NIXL, SharedMemory, Ferry)
	}
	role := roleSender
	if e.to == id {
		role = roleReceiver
	}
	if e.role != "" && e.role != role {
		extra, _ := e.field("extra")
		v, _ := extra.field("role")
		return v.bad("stage %d is the %s of edge %d to %d; leave role out", id, role, e.from, e.to)
	}
	return nil
}

// sender is the port that a consumer asks at.
func (e edge) sender(p Place) (int, error) {
	if e.senderPort != 0 {
		return e.senderPort, nil
	}
	return e.port(e.base, e.from, p)
}

func (c *connector) senderHostOr(h *hosts) string {
	switch {
	case c.senderHost != "":
		return c.senderHost
	case !c.hostGiven:
		return defaultSenderHost
	}
	return h.or(c, c.host)
}

func (c *connector) hostWarning(host, text string) Warning {
	return Warning{File: c.file, Key: join(c.key, "extra.host"), Value: fmt.Sprintf("%q", host), Text: text}
}

// bind is where a stage publishes on an edge that is no shared memory.
type bind struct {
	c         *connector
	to, from  int
	host      string // "": detect
	base      int
	baseGiven bool
}

// binds of a stage: of its outgoing edges, or, where the file has none, of the outgoing block of what it receives on.
func (d *Deployment) binds(id int) []bind {
	var all []bind
	for _, e := range d.edges {
		if e.from == id && e.wired() {
			all = append(all, bind{e.connector, e.to, id, e.host, e.base, e.baseGiven})
		}
	}
	if slices.ContainsFunc(d.edges, func(e edge) bool { return e.from == id }) {
		return all
	}
	for _, e := range d.edges {
		if o := e.outgoing; o != nil && e.to == id {
			from := o.from
			if from < 0 {
				from = id
			}
			return []bind{{e.connector, o.to, from, o.host, o.base, o.baseGiven}}
		}
	}
	return nil
}

// hosts detects this machine's host at most once.
type hosts struct {
	detect   func() (host, warning string)
	host     string
	warnings []Warning
}

func (h *hosts) or(c *connector, host string) string {
	if host != "" {
		return host
	}
	if h.host == "" {
		var warning string
		if h.host, warning = h.detect(); warning != "" {
			h.warnings = append(h.warnings, c.hostWarning(h.host, warning))
		}
	}
	return h.host
}
