package wire

import (
	"math"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/tensor"
)

// DecodeMetadata decodes and checks (see Metadata.Check) what a claim is answered with, or what put returned. Strings and byte
// slices are copies, except Ferry.Inline, which is a view over b. Errors are *FrameError.
func DecodeMetadata(b []byte) (*Metadata, error) {
	r := newReader(b, 0)
	if len(b) > MaxReply {
		r.Fail(ErrLimit, "metadata of %d bytes, limit %d", len(b), MaxReply)
		return nil, r.err()
	}
	m, err := r.metadata()
	if err != nil {
		// Metadata of another schema may differ in anything: it is told from what is malformed.
		if other := otherSchema(b); other != nil {
			return nil, other
		}
		return nil, err
	}
	if f := m.check(); f != nil {
		r.Fail(f.kind, "%s", f.text)
		return nil, r.err()
	}
	return m, nil
}

func (r *reader) metadata() (*Metadata, error) {
	m := &Metadata{Legacy: true, Size: -1}
	var agent []byte
	var ferry reader
	var schema, groups, specs bool
	for name := range r.Fields() {
		switch string(name) {
		case fieldSchema:
			r.schema()
			schema = true
		case fieldKind:
			m.Kind = r.kind()
		case fieldAgent:
			agent = r.Bin(MaxAgentMetadata)
		case fieldGroups:
			m.Groups = r.groups()
			groups = true
		case fieldSpecs:
			m.Specs = r.specs()
			specs = true
		case fieldSize:
			m.Size = r.Size(math.MaxInt64)
		case fieldHost:
			m.SenderHost = r.host()
		case fieldPort:
			m.SenderPort = r.port()
		case fieldGeneration:
			m.Generation = r.id()
			m.Legacy = false
		case fieldClaim:
			m.Claim = r.claim()
		case fieldFerry:
			ferry = r.ferry()
		default:
			r.Skip()
		}
	}
	r.End()
	switch {
	case !schema:
		r.Missing(fieldSchema)
	case m.Kind == 0:
		r.Missing(fieldKind)
	case !groups:
		r.Missing(fieldGroups)
	case !specs:
		r.Missing(fieldSpecs)
	}
	if err := r.err(); err != nil {
		return nil, err
	}
	if m.Size < 0 {
		m.Size = 0
		for i := range m.Specs {
			m.Size += m.Specs[i].Size // over 2^63 it is not what check adds up, and refused there
		}
	}
	if ferry.ours() {
		m.Ferry = ferry.ferryMetadata()
		if err := ferry.err(); err != nil {
			return nil, err
		}
	}
	m.AgentMetadata = copied(agent)
	return m, nil
}

// otherSchema is the fault of metadata whose schema's version is not ours, nil if there is none to be found.
func otherSchema(b []byte) error {
	r := newReader(b, 0)
	for name := range r.Fields() {
		if string(name) == fieldSchema {
			r.schema()
			return r.err()
		}
		r.Skip()
	}
	return nil
}

// schema reads the schema's version, which must be ours.
func (r *reader) schema() {
	if t := r.Type(); t != msgp.IntType && t != msgp.UintType {
		r.Fail(ErrSchema, "a version of type %s, this end reads %d", t, SchemaVersion)
	}
	next := *r
	if v := next.Int(math.MinInt64, math.MaxInt64); v != SchemaVersion {
		r.Fail(ErrSchema, "version %d, this end reads %d", v, SchemaVersion)
		return
	}
	*r = next
}

func (r *reader) kind() Kind {
	at := r.Offset()
	s := r.Str(MaxID)
	for k := Tensors; k <= Object; k++ {
		if string(s) == k.String() {
			return k
		}
	}
	r.FailAt(at, ErrSchema, "%q; this end reads tensors, structured and object", clip(s))
	return 0
}

// host reads a name or address; nil is none.
func (r *reader) host() string {
	if r.Null() {
		return ""
	}
	return r.Text(MaxHost)
}

// port reads a port; nil is none.
func (r *reader) port() int {
	if r.Null() {
		return 0
	}
	return int(r.Int(0, math.MaxUint16))
}

func (r *reader) groups() []Group {
	n := r.Array(MaxGroups, 1)
	if n == 0 {
		return nil
	}
	outer := r.in(fieldGroups)
	groups := make([]Group, n)
	for i := range groups {
		r.group(&groups[i])
	}
	r.Leave(outer)
	return groups
}

func (r *reader) group(g *Group) {
	var indices []int
	for name := range r.Fields() {
		switch string(name) {
		case fieldMemory:
			g.MemoryType = r.Text(MaxMemoryType)
		case fieldIndices:
			indices = r.indices()
		case fieldRegions:
			g.Regions = r.regions()
		default:
			r.Skip()
		}
	}
	r.At(nil)
	if len(indices) != len(g.Regions) {
		r.Fail(ErrMalformed, "%d %s and %d %s", len(indices), fieldIndices, len(g.Regions), fieldRegions)
		return
	}
	for i, t := range indices {
		g.Regions[i].Tensor = t
	}
}

func (r *reader) indices() []int {
	v := make([]int, r.Array(MaxTensors, 1))
	for i := range v {
		v[i] = int(r.Size(MaxTensors - 1))
	}
	return v
}

func (r *reader) regions() []Region {
	v := make([]Region, r.Array(MaxTensors, 4))
	for i := range v {
		r.region(&v[i])
	}
	return v
}

// region reads [address, bytes, device] and, if there is a fourth element, passes over it.
func (r *reader) region(v *Region) {
	at := r.Offset()
	n := r.Array(4, 1)
	if n < 3 {
		r.FailAt(at, ErrMalformed, "a region of %d numbers, want address, bytes and device", n)
	}
	v.Addr = r.Uint(math.MaxUint64)
	v.Bytes = r.Size(math.MaxInt64)
	v.Device = int(r.Size(math.MaxInt32))
	if n == 4 {
		r.Skip()
	}
}

func (r *reader) specs() []Spec {
	n := r.Array(MaxTensors, 1)
	if n == 0 {
		return nil
	}
	outer := r.in(fieldSpecs)
	specs := make([]Spec, n)
	for i := range specs {
		r.spec(&specs[i])
	}
	r.Leave(outer)
	return specs
}

func (r *reader) spec(s *Spec) {
	s.Size = -1
	var shape, dtype bool
	for name := range r.Fields() {
		switch string(name) {
		case fieldShape:
			s.Shape = r.shape()
			shape = true
		case fieldDType:
			s.DType = r.dtype()
			dtype = true
		case fieldDevice:
			s.Device = r.device()
		case fieldSize:
			s.Size = r.Size(math.MaxInt64)
		default:
			r.Skip()
		}
	}
	switch {
	case !shape:
		r.Missing(fieldShape)
	case !dtype:
		r.Missing(fieldDType)
	case s.Size < 0:
		r.Missing(fieldSize)
	}
}

func (r *reader) shape() tensor.Shape {
	s := make(tensor.Shape, r.Array(tensor.MaxRank, 1))
	for i := range s {
		s[i] = r.Size(math.MaxInt64)
	}
	return s
}

func (r *reader) dtype() tensor.DType {
	at := r.Offset()
	d, err := tensor.ParseDType(r.Text(MaxID))
	if err != nil {
		r.refuse(at, err)
	}
	return d
}

// device reads a device's name; nil is the CPU.
func (r *reader) device() tensor.Device {
	if r.Null() {
		return tensor.Device{}
	}
	at := r.Offset()
	d, err := tensor.ParseDevice(r.Text(MaxID))
	if err != nil {
		r.refuse(at, err)
	}
	return d
}

func (r *reader) ferryMetadata() *FerryMetadata {
	f := &FerryMetadata{V: ExtensionVersion}
	for name := range r.Fields() {
		switch string(name) {
		case fieldV:
			r.version()
		case fieldTry:
			f.Try = r.Uint(math.MaxUint64)
		case fieldNode:
			f.Node = r.Text(MaxNode)
		case fieldEpoch:
			f.Epoch = r.Uint(math.MaxUint64)
		case fieldLocal:
			f.Local = r.Text(MaxLocal)
		case fieldLease:
			f.LeaseMS = r.milliseconds()
		case fieldSlot:
			f.Slot = uint32(r.Uint(math.MaxUint32))
		case fieldGen:
			f.Gen = r.Uint(math.MaxUint64)
		case fieldTop:
			f.Top = Top(r.Int(0, int64(TopTuple)))
		case fieldPlanes:
			f.Planes = r.planes()
		case fieldOffsets:
			f.Offsets = r.offsets()
		case fieldSum:
			u := r.Uint(math.MaxUint64)
			f.Sum = &u
		case fieldInline:
			f.Inline = r.Bin(MaxInline)
		default:
			r.Skip()
		}
	}
	return f
}

func (r *reader) offsets() []int64 {
	n := r.Array(MaxTensors, 1)
	if n == 0 {
		return nil
	}
	v := make([]int64, n)
	for i := range v {
		v[i] = r.Size(math.MaxInt64)
	}
	return v
}

func (r *reader) planes() []PlaneOffer {
	n := r.Array(MaxPlanes, 1)
	if n == 0 {
		return nil
	}
	outer := r.in(fieldPlanes)
	offers := make([]PlaneOffer, n)
	for i := range offers {
		offers[i] = r.plane()
	}
	r.Leave(outer)
	return offers
}

func (r *reader) plane() PlaneOffer {
	var name, metadata, token []byte
	for field := range r.Fields() {
		switch string(field) {
		case fieldName:
			name = r.Str(MaxPlaneName)
		case fieldMetadata:
			metadata = r.Bin(MaxPlaneMetadata)
		case fieldToken:
			token = r.Bin(MaxToken)
		default:
			r.Skip()
		}
	}
	if name == nil {
		r.Missing(fieldName)
	}
	return PlaneOffer{Name: string(name), Metadata: copied(metadata), Token: copied(token)}
}
