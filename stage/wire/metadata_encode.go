package wire

import (
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/internal/msgpack"
)

// AppendMetadata encodes m as the peers do, fields in their order; the extension comes last. It does not check m (see Check).
func AppendMetadata(b []byte, m *Metadata) []byte {
	serves := m.SenderHost != "" || m.SenderPort != 0
	n := 6 + 2*msgpack.Count(serves) + msgpack.Count(!m.Legacy, !m.Claim.IsZero(), m.Ferry != nil)
	b = slices.Grow(b, m.room())
	b = msgp.AppendMapHeader(b, n)
	b = msgpack.AppendInt(msgp.AppendString(b, fieldSchema), SchemaVersion)
	b = msgpack.AppendStr(b, fieldKind, m.Kind.String())
	b = msgp.AppendBytes(msgp.AppendString(b, fieldAgent), m.AgentMetadata)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, fieldGroups), uint32(len(m.Groups)))
	for i := range m.Groups {
		b = appendGroup(b, &m.Groups[i])
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, fieldSpecs), uint32(len(m.Specs)))
	for i := range m.Specs {
		b = appendSpec(b, &m.Specs[i])
	}
	b = msgpack.AppendInt(msgp.AppendString(b, fieldSize), m.Size)
	if serves {
		b = msgpack.AppendStr(b, fieldHost, m.SenderHost)
		b = msgpack.AppendInt(msgp.AppendString(b, fieldPort), int64(m.SenderPort))
	}
	if !m.Legacy {
		b = appendID(b, fieldGeneration, m.Generation)
	}
	if !m.Claim.IsZero() {
		b = appendID(b, fieldClaim, m.Claim)
	}
	if m.Ferry != nil {
		b = appendFerryMetadata(msgp.AppendString(b, fieldFerry), m.Ferry)
	}
	return b
}

// room is at least the encoded size.
func (m *Metadata) room() int {
	n := 256 + len(m.AgentMetadata) + len(m.SenderHost) + len(m.Generation.text) + len(m.Claim.text)
	for i := range m.Groups {
		n += 64 + len(m.Groups[i].MemoryType) + 32*len(m.Groups[i].Regions)
	}
	for i := range m.Specs {
		n += 80 + 9*len(m.Specs[i].Shape)
	}
	if f := m.Ferry; f != nil {
		n += 160 + len(f.Node) + len(f.Local) + 9*len(f.Offsets) + len(f.Inline)
		for i := range f.Planes {
			n += 48 + len(f.Planes[i].Name) + len(f.Planes[i].Metadata) + len(f.Planes[i].Token)
		}
	}
	return n
}

func appendGroup(b []byte, g *Group) []byte {
	b = msgp.AppendMapHeader(b, 3)
	b = msgpack.AppendStr(b, fieldMemory, g.MemoryType)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, fieldIndices), uint32(len(g.Regions)))
	for i := range g.Regions {
		b = msgpack.AppendInt(b, int64(g.Regions[i].Tensor))
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, fieldRegions), uint32(len(g.Regions)))
	for i := range g.Regions {
		r := &g.Regions[i]
		b = msgp.AppendArrayHeader(b, 4)
		b = msgp.AppendUint64(b, r.Addr)
		b = msgpack.AppendInt(b, r.Bytes)
		b = msgpack.AppendInt(b, int64(r.Device))
		b = msgp.AppendString(b, "") // NIXL's metadata of a region: none
	}
	return b
}

func appendSpec(b []byte, s *Spec) []byte {
	b = msgp.AppendMapHeader(b, 4)
	b = appendShape(b, s.Shape)
	b = msgpack.AppendStr(b, fieldDType, s.DType.String())
	b = msgpack.AppendStr(b, fieldDevice, s.Device.String())
	return msgpack.AppendInt(msgp.AppendString(b, fieldSize), s.Size)
}

func appendShape(b []byte, shape []int64) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, fieldShape), uint32(len(shape)))
	for _, d := range shape {
		b = msgpack.AppendInt(b, d)
	}
	return b
}

func appendFerryMetadata(b []byte, f *FerryMetadata) []byte {
	b = msgp.AppendMapHeader(b, 1+msgpack.Count(f.Try != 0, f.Node != "", f.Epoch != 0, f.Local != "", f.LeaseMS != 0, f.Gen != 0, f.Gen != 0, f.Top != 0, len(f.Planes) > 0, len(f.Offsets) > 0,
		f.Sum != nil, f.Inline != nil))
	b = appendV(b, f.V)
	b = msgpack.OptionalUint(b, fieldTry, f.Try)
	b = msgpack.OptionalStr(b, fieldNode, f.Node)
	b = msgpack.OptionalUint(b, fieldEpoch, f.Epoch)
	b = msgpack.OptionalStr(b, fieldLocal, f.Local)
	b = msgpack.OptionalInt(b, fieldLease, f.LeaseMS)
	if f.Gen != 0 {
		b = msgp.AppendUint64(msgp.AppendString(b, fieldSlot), uint64(f.Slot))
		b = msgp.AppendUint64(msgp.AppendString(b, fieldGen), f.Gen)
	}
	b = msgpack.OptionalUint(b, fieldTop, uint64(f.Top))
	if len(f.Planes) > 0 {
		b = msgp.AppendArrayHeader(msgp.AppendString(b, fieldPlanes), uint32(len(f.Planes)))
		for i := range f.Planes {
			p := &f.Planes[i]
			b = msgp.AppendMapHeader(b, 1+msgpack.Count(len(p.Metadata) > 0, len(p.Token) > 0))
			b = msgpack.AppendStr(b, fieldName, p.Name)
			b = msgpack.OptionalBin(b, fieldMetadata, p.Metadata)
			b = msgpack.OptionalBin(b, fieldToken, p.Token)
		}
	}
	if len(f.Offsets) > 0 {
		b = msgp.AppendArrayHeader(msgp.AppendString(b, fieldOffsets), uint32(len(f.Offsets)))
		for _, o := range f.Offsets {
			b = msgpack.AppendInt(b, o)
		}
	}
	if f.Sum != nil {
		b = msgp.AppendUint64(msgp.AppendString(b, fieldSum), *f.Sum)
	}
	if f.Inline != nil {
		b = msgp.AppendBytes(msgp.AppendString(b, fieldInline), f.Inline)
	}
	return b
}
