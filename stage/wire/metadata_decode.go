package wire

import (
	"bytes"
	"math"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tinylib/msgp/msgp"
)

// DecodeMetadata decodes and checks (see Metadata.Check) what a claim is answered with, or what put returned. Strings and byte
// slices are copies, except Ferry.Inline, which is a view over b. Errors are *FrameError.
func DecodeMetadata(b []byte) (*Metadata, error) {
	r := newReader(b)
	if len(b) > MaxReply {
		return nil, r.fail(ErrLimit, "metadata of %d bytes, limit %d", len(b), MaxReply)
	}
	at := r
	m, err := r.metadata()
	if err != nil {
		// Metadata of another schema may differ in anything: it is told from what is malformed.
		if at.findSchema() {
			if other := at.schema(); other != nil {
				return nil, other
			}
		}
		return nil, err
	}
	if f := m.check(); f != nil {
		r.name = nil
		return nil, r.fail(f.kind, "%s", f.text)
	}
	return m, nil
}

func (r *reader) metadata() (*Metadata, error) {
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	m := &Metadata{Legacy: true, Size: -1}
	var agent []byte
	var ferry reader
	var schema, groups, specs bool
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldSchema:
			err = r.schema()
			schema = true
		case fieldKind:
			m.Kind, err = r.kind()
		case fieldAgent:
			agent, err = r.bin(MaxAgentMetadata)
		case fieldGroups:
			m.Groups, err = r.groups()
			groups = true
		case fieldSpecs:
			m.Specs, err = r.specs()
			specs = true
		case fieldSize:
			m.Size, err = r.size(math.MaxInt64)
		case fieldHost:
			m.SenderHost, err = r.host()
		case fieldPort:
			m.SenderPort, err = r.port()
		case fieldGeneration:
			m.Generation, err = r.id()
			m.Legacy = false
		case fieldClaim:
			m.Claim, err = r.claim()
		case fieldFerry:
			ferry, err = r.raw()
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	switch {
	case !schema:
		return nil, r.missing(fieldSchema)
	case m.Kind == 0:
		return nil, r.missing(fieldKind)
	case !groups:
		return nil, r.missing(fieldGroups)
	case !specs:
		return nil, r.missing(fieldSpecs)
	}
	if m.Size < 0 {
		m.Size = 0
		for i := range m.Specs {
			m.Size += m.Specs[i].Size // over 2^63 it is not what check adds up, and refused there
		}
	}
	if ferry.ours() {
		if m.Ferry, err = ferry.ferryMetadata(); err != nil {
			return nil, err
		}
	}
	m.AgentMetadata = copied(agent)
	return m, nil
}

// schema reads the schema's version, which must be ours.
func (r *reader) schema() error {
	if t := msgp.NextType(r.rest); t != msgp.IntType && t != msgp.UintType {
		return r.fail(ErrSchema, "a version of type %s, this end reads %d", t, SchemaVersion)
	}
	at := *r
	if v, err := r.int(math.MinInt64, math.MaxInt64); err != nil || v != SchemaVersion {
		return at.fail(ErrSchema, "version %d, this end reads %d", v, SchemaVersion)
	}
	return nil
}

// findSchema goes to the schema's version, if there is one.
func (r *reader) findSchema() bool {
	n, err := r.fields()
	if err != nil {
		return false
	}
	for range n {
		name, err := r.next()
		if err == nil && string(name) == fieldSchema {
			return true
		}
		if err != nil || r.skip() != nil {
			return false
		}
	}
	return false
}

func (r *reader) kind() (Kind, error) {
	at := *r
	s, err := r.str(MaxID)
	if err != nil {
		return 0, err
	}
	for k := Tensors; k <= Object; k++ {
		if string(s) == k.String() {
			return k, nil
		}
	}
	return 0, at.fail(ErrSchema, "%q; this end reads tensors, structured and object", clip(s))
}

// host reads a name or address; nil is none.
func (r *reader) host() (string, error) {
	if r.null() {
		return "", nil
	}
	return r.text(MaxHost)
}

// port reads a port; nil is none.
func (r *reader) port() (int, error) {
	if r.null() {
		return 0, nil
	}
	p, err := r.int(0, math.MaxUint16)
	return int(p), err
}

func (r *reader) groups() ([]Group, error) {
	n, err := r.array(MaxGroups, 1)
	if err != nil || n == 0 {
		return nil, err
	}
	in := r.in()
	groups := make([]Group, n)
	for i := range groups {
		if err := in.group(&groups[i]); err != nil {
			return nil, err
		}
	}
	r.leave(&in)
	return groups, nil
}

func (r *reader) group(g *Group) error {
	n, err := r.fields()
	if err != nil {
		return err
	}
	var indices []int
	for range n {
		name, err := r.next()
		if err != nil {
			return err
		}
		switch string(name) {
		case fieldMemory:
			g.MemoryType, err = r.text(MaxMemoryType)
		case fieldIndices:
			indices, err = r.indices()
		case fieldRegions:
			g.Regions, err = r.regions()
		default:
			err = r.skip()
		}
		if err != nil {
			return err
		}
	}
	r.name = nil
	if len(indices) != len(g.Regions) {
		return r.fail(ErrMalformed, "%d %s and %d %s", len(indices), fieldIndices, len(g.Regions), fieldRegions)
	}
	for i, t := range indices {
		g.Regions[i].Tensor = t
	}
	return nil
}

func (r *reader) indices() ([]int, error) {
	n, err := r.array(MaxTensors, 1)
	if err != nil {
		return nil, err
	}
	v := make([]int, n)
	for i := range v {
		t, err := r.size(MaxTensors - 1)
		if err != nil {
			return nil, err
		}
		v[i] = int(t)
	}
	return v, nil
}

func (r *reader) regions() ([]Region, error) {
	n, err := r.array(MaxTensors, 4)
	if err != nil {
		return nil, err
	}
	v := make([]Region, n)
	for i := range v {
		if err := r.region(&v[i]); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// region reads [address, bytes, device] and, if there is a fourth element, passes over it.
func (r *reader) region(v *Region) error {
	at := *r
	n, err := r.array(4, 1)
	if err != nil {
		return err
	}
	if n < 3 {
		return at.fail(ErrMalformed, "a region of %d numbers, want address, bytes and device", n)
	}
	if v.Addr, err = r.uint(math.MaxUint64); err != nil {
		return err
	}
	if v.Bytes, err = r.size(math.MaxInt64); err != nil {
		return err
	}
	device, err := r.size(math.MaxInt32)
	if err != nil {
		return err
	}
	v.Device = int(device)
	if n == 4 {
		return r.skip()
	}
	return nil
}

func (r *reader) specs() ([]Spec, error) {
	n, err := r.array(MaxTensors, 1)
	if err != nil || n == 0 {
		return nil, err
	}
	in := r.in()
	specs := make([]Spec, n)
	for i := range specs {
		if err := in.spec(&specs[i]); err != nil {
			return nil, err
		}
	}
	r.leave(&in)
	return specs, nil
}

func (r *reader) spec(s *Spec) error {
	n, err := r.fields()
	if err != nil {
		return err
	}
	s.Size = -1
	var shape, dtype bool
	for range n {
		name, err := r.next()
		if err != nil {
			return err
		}
		switch string(name) {
		case fieldShape:
			s.Shape, err = r.shape()
			shape = true
		case fieldDType:
			s.DType, err = r.dtype()
			dtype = true
		case fieldDevice:
			s.Device, err = r.device()
		case fieldSize:
			s.Size, err = r.size(math.MaxInt64)
		default:
			err = r.skip()
		}
		if err != nil {
			return err
		}
	}
	switch {
	case !shape:
		return r.missing(fieldShape)
	case !dtype:
		return r.missing(fieldDType)
	case s.Size < 0:
		return r.missing(fieldSize)
	}
	return nil
}

func (r *reader) shape() (tensor.Shape, error) {
	n, err := r.array(tensor.MaxRank, 1)
	if err != nil {
		return nil, err
	}
	s := make(tensor.Shape, n)
	for i := range s {
		if s[i], err = r.size(math.MaxInt64); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (r *reader) dtype() (tensor.DType, error) {
	at := *r
	s, err := r.text(MaxID)
	if err != nil {
		return 0, err
	}
	d, err := tensor.ParseDType(s)
	if err != nil {
		return 0, at.refuse(err)
	}
	return d, nil
}

// device reads a device's name; nil is the CPU.
func (r *reader) device() (tensor.Device, error) {
	if r.null() {
		return tensor.Device{}, nil
	}
	at := *r
	s, err := r.text(MaxID)
	if err != nil {
		return tensor.Device{}, err
	}
	d, err := tensor.ParseDevice(s)
	if err != nil {
		return tensor.Device{}, at.refuse(err)
	}
	return d, nil
}

func (r *reader) ferryMetadata() (*FerryMetadata, error) {
	f := &FerryMetadata{V: ExtensionVersion}
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldV:
			err = r.version()
		case fieldTry:
			f.Try, err = r.uint(math.MaxUint64)
		case fieldNode:
			f.Node, err = r.text(MaxNode)
		case fieldEpoch:
			f.Epoch, err = r.uint(math.MaxUint64)
		case fieldLocal:
			f.Local, err = r.text(MaxLocal)
		case fieldLease:
			f.LeaseMS, err = r.milliseconds()
		case fieldSlot:
			var slot uint64
			slot, err = r.uint(math.MaxUint32)
			f.Slot = uint32(slot)
		case fieldGen:
			f.Gen, err = r.uint(math.MaxUint64)
		case fieldTop:
			var top int64
			top, err = r.int(0, int64(TopTuple))
			f.Top = Top(top)
		case fieldPlanes:
			f.Planes, err = r.planes()
		case fieldOffsets:
			f.Offsets, err = r.offsets()
		case fieldSum:
			var u uint64
			u, err = r.uint(math.MaxUint64)
			f.Sum = &u
		case fieldInline:
			f.Inline, err = r.bin(MaxInline)
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (r *reader) offsets() ([]int64, error) {
	n, err := r.array(MaxTensors, 1)
	if err != nil || n == 0 {
		return nil, err
	}
	v := make([]int64, n)
	for i := range v {
		if v[i], err = r.size(math.MaxInt64); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (r *reader) planes() ([]PlaneOffer, error) {
	n, err := r.array(MaxPlanes, 1)
	if err != nil || n == 0 {
		return nil, err
	}
	in := r.in()
	offers := make([]PlaneOffer, n)
	for i := range offers {
		if err := in.plane(&offers[i]); err != nil {
			return nil, err
		}
	}
	r.leave(&in)
	return offers, nil
}

func (r *reader) plane(p *PlaneOffer) error {
	n, err := r.fields()
	if err != nil {
		return err
	}
	var name, metadata, token []byte
	for range n {
		field, err := r.next()
		if err != nil {
			return err
		}
		switch string(field) {
		case fieldName:
			name, err = r.str(MaxPlaneName)
		case fieldMetadata:
			metadata, err = r.bin(MaxPlaneMetadata)
		case fieldToken:
			token, err = r.bin(MaxToken)
		default:
			err = r.skip()
		}
		if err != nil {
			return err
		}
	}
	if name == nil {
		return r.missing(fieldName)
	}
	p.Name, p.Metadata, p.Token = string(name), copied(metadata), copied(token)
	return nil
}

// copied is nil for nothing: a field that is left out and an empty one are the same.
func copied(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return bytes.Clone(b)
}
