package deploy

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// Purpose of a connector's socket: each has ports of its own.
type Purpose uint8

// The purposes, with vLLM-Omni's names.
const (
	RequestForwarding Purpose = iota
	KVTransfer
	Orchestrator
)

// The port formula of vLLM-Omni 0.30: base + purpose + replica x 1024 + rank x 16 + stage.
const (
	purposeStride = 100
	replicaStride = 1024
	stageStride   = 16 // also the number of stages that have ports
	ranksApart    = replicaStride / stageStride
)

func (p Purpose) String() string {
	switch p {
	case RequestForwarding:
		return "request_forwarding"
	case KVTransfer:
		return "kv_transfer"
	case Orchestrator:
		return "orchestrator"
	}
	return fmt.Sprintf("Purpose(%d)", p)
}

// Place of a worker in its stage. Rank is its tensor-parallel rank.
type Place struct {
	Replica, Rank int
	Purpose       Purpose
}

// problem says what is wrong with the place, or "".
func (p Place) problem() string {
	switch {
	case p.Purpose > Orchestrator:
		return fmt.Sprintf("%v: give one of the three", p.Purpose)
	case p.Replica < 0 || p.Replica > math.MaxUint16:
		return fmt.Sprintf("replica %d: give 0 to %d", p.Replica, math.MaxUint16)
	case p.Rank < 0 || p.Rank > math.MaxUint16:
		return fmt.Sprintf("rank %d: give 0 to %d", p.Rank, math.MaxUint16)
	}
	return ""
}

// Port is where a producer of stage from listens at a place, by the peers' formula. It is not free of collisions: see CheckPorts.
// Errors wrap ErrPort: from is not 0 to 15, or the port would not be 1 to 65535.
func Port(base, from int, p Place) (int, error) {
	port, problem := formula(base, from, p)
	if problem != "" {
		return 0, fmt.Errorf("%w: %s", ErrPort, problem)
	}
	return port, nil
}

func formula(base, from int, p Place) (port int, problem string) {
	if problem := p.problem(); problem != "" {
		return 0, problem
	}
	if from < 0 || from >= stageStride {
		return 0, fmt.Sprintf("stage %d: the formula has ports for the stages 0 to %d", from, stageStride-1)
	}
	port = base + int(p.Purpose)*purposeStride + p.Replica*replicaStride + p.Rank*stageStride + from
	if port < 1 || port > math.MaxUint16 {
		return 0, fmt.Sprintf("%v of stage %d, replica %d, rank %d would be at port %d: take another base, so that it is 1 to %d",
			p.Purpose, from, p.Replica, p.Rank, port, math.MaxUint16)
	}
	return port, ""
}

// port of an edge's producer. 0: any free one.
func (c *connector) port(base, from int, p Place) (int, error) {
	if base == 0 {
		return 0, nil
	}
	n, problem := formula(base, from, p)
	if problem != "" {
		return 0, &Error{Err: ErrPort, File: c.file, Key: join(c.key, "extra.zmq_port"), Value: strconv.Itoa(base), Text: problem}
	}
	return n, nil
}

// Listener is a socket that a producer of the deployment binds.
type Listener struct {
	Stage     int
	Place     Place
	Connector string
	Host      string // as the file has it; "": detected
	Port      int

	c *connector
}

func (l Listener) String() string {
	return fmt.Sprintf("%v of stage %d, replica %d, rank %d", l.Place.Purpose, l.Stage, l.Place.Replica, l.Place.Rank)
}

// Listeners are all that the deployment's producers bind at ports of the formula: for the purposes, or where none is given for
// request forwarding, and for KV transfer of stages with SendsKV. Errors are those of Port, one for each stage and purpose.
func (d *Deployment) Listeners(purposes ...Purpose) ([]Listener, error) {
	var all []Listener
	var errs []error
	for _, s := range d.Stages {
		of := purposes
		if len(of) == 0 {
			of = []Purpose{RequestForwarding}
			if s.SendsKV {
				of = append(of, KVTransfer)
			}
		}
		var seen []*connector
		for _, b := range d.binds(s.ID) {
			if slices.Contains(seen, b.c) {
				continue // edges of one connector share a listener
			}
			seen = append(seen, b.c)
			for _, purpose := range of {
				ls, err := s.listeners(b, purpose)
				all = append(all, ls...)
				errs = append(errs, err)
			}
		}
	}
	return all, errors.Join(errs...)
}

func (s StageInfo) listeners(b bind, purpose Purpose) (all []Listener, err error) {
	for replica := range s.Replicas {
		for rank := range s.Ranks {
			place := Place{Replica: replica, Rank: rank, Purpose: purpose}
			port, err := b.c.port(b.base, b.from, place)
			if err != nil || port == 0 {
				return all, err
			}
			all = append(all, Listener{Stage: s.ID, Place: place, Connector: b.c.Connector, Host: b.host, Port: port, c: b.c})
		}
	}
	return all, nil
}

// maxCollisions are told; there may be many that have one cause.
const maxCollisions = 8

// CheckPorts finds listeners of one host that would bind one port. here says which of the deployment are on this host; nil: all are.
// Listeners on two hosts that the file names do not collide; one whose host is detected may with any. Errors are a join of *Error
// that wrap ErrCollision, with both users of the port, or ErrPort.
func (d *Deployment) CheckPorts(here func(Listener) bool, purposes ...Purpose) error {
	all, err := d.Listeners(purposes...)
	errs := []error{err}
	users := make(map[int][]Listener)
	found := 0
	for _, l := range all {
		if here != nil && !here(l) {
			continue
		}
		for _, u := range users[l.Port] {
			if u.Host != l.Host && u.Host != "" && l.Host != "" {
				continue
			}
			if found++; found <= maxCollisions {
				errs = append(errs, collision(u, l))
			}
		}
		users[l.Port] = append(users[l.Port], l)
	}
	if more := found - maxCollisions; more > 0 {
		errs = append(errs, fmt.Errorf("%w: and %d more", ErrCollision, more))
	}
	return errors.Join(errs...)
}

func collision(a, b Listener) error {
	fix := "give one of them a connector with another zmq_port"
	if a.Stage == b.Stage && a.c == b.c {
		fix = fmt.Sprintf("a replica has ports for at most %d ranks", ranksApart)
	}
	return &Error{
		Err: ErrCollision, File: b.c.file, Key: join(b.c.key, "extra.zmq_port"), Value: strconv.Itoa(b.Port),
		Text: fmt.Sprintf("a port of both %v and %v; %s", a, b, fix),
	}
}
