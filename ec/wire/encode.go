package wire

import (
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/internal/msgpack"
)

// Append* append the encoding to b and return the extended slice; they allocate only if b has too little capacity. Fields equal to
// their default are left out. generation is the sender's own: it is left out on the wire when Version is it.

// AppendRequest encodes r.
func AppendRequest(b []byte, r *Request, generation int) []byte {
	explicit := r.Version != 0 && r.Version != generation
	n := 3 + msgpack.Count(r.Session != "", explicit, r.Ferry != nil)
	b = slices.Grow(b, 128+len(r.Key)+len(r.CompatHash)+len(r.Session)+r.Ferry.room())
	b = header(b, n, tagRequest)
	b = msgpack.AppendStr(b, fieldKey, r.Key)
	b = msgpack.AppendStr(b, fieldCompat, r.CompatHash)
	b = msgpack.OptionalStr(b, fieldSession, r.Session)
	if explicit {
		b = msgp.AppendString(b, fieldVersion)
		b = msgpack.AppendInt(b, int64(r.Version))
	}
	if r.Ferry != nil {
		b = msgp.AppendString(b, fieldFerry)
		b = appendFerryRequest(b, r.Ferry)
	}
	return b
}

// AppendAck encodes a. A NACK as the peers send it has only Key and Status set.
func AppendAck(b []byte, a *Ack) []byte {
	b = appendAck(b, a, msgpack.Count(len(a.MemDescriptor) > 0, a.Ferry != nil), len(a.MemDescriptor)+a.Ferry.room())
	b = msgpack.OptionalBin(b, fieldMem, a.MemDescriptor)
	if a.Ferry != nil {
		b = msgp.AppendString(b, fieldFerry)
		b = appendFerryAck(b, a.Ferry)
	}
	return b
}

// AppendAckHead encodes a, which has neither MemDescriptor nor Ferry, up to where a MemDescriptor of size bytes begins: those follow as
// they are, and nothing after them.
func AppendAckHead(b []byte, a *Ack, size int) []byte {
	b = appendAck(b, a, 1, 0)
	b = msgp.AppendString(b, fieldMem)
	return msgp.AppendBytesHeader(b, uint32(size))
}

// appendAck encodes what an ack begins with. more fields follow, for which there will be room bytes.
func appendAck(b []byte, a *Ack, more uint32, room int) []byte {
	n := 3 + more + msgpack.Count(a.Session != "", len(a.Blocks) > 0, len(a.AgentMetadata) > 0)
	b = slices.Grow(b, 160+len(a.Key)+len(a.Session)+5*len(a.Blocks)+len(a.AgentMetadata)+room)
	b = header(b, n, tagAck)
	b = msgpack.AppendStr(b, fieldKey, a.Key)
	b = msgp.AppendString(b, fieldStatus)
	b = msgp.AppendUint64(b, uint64(a.Status))
	b = msgpack.OptionalStr(b, fieldSession, a.Session)
	if len(a.Blocks) > 0 {
		b = msgp.AppendString(b, fieldBlocks)
		b = msgp.AppendArrayHeader(b, uint32(len(a.Blocks)))
		for _, n := range a.Blocks {
			b = msgp.AppendUint64(b, uint64(n))
		}
	}
	return msgpack.OptionalBin(b, fieldAgent, a.AgentMetadata)
}

// AppendVerify encodes v.
func AppendVerify(b []byte, v *Verify) []byte {
	return appendCheck(b, tagVerify, v.Key, v.Session, v.Grant, v.Gen, fieldFailed, v.Failed)
}

// AppendVerified encodes v.
func AppendVerified(b []byte, v *Verified) []byte {
	return appendCheck(b, tagVerified, v.Key, v.Session, v.Grant, v.Gen, fieldOK, v.OK)
}

// AppendPulled encodes p.
func AppendPulled(b []byte, p *Pulled) []byte {
	b = header(b, 4, tagPulled)
	b = appendV(b, 0)
	b = msgpack.AppendStr(b, fieldCompat, p.CompatHash)
	b = msgp.AppendString(b, fieldEntries)
	b = msgp.AppendArrayHeader(b, uint32(len(p.Entries)))
	for _, e := range p.Entries {
		b = msgp.AppendArrayHeader(b, 2)
		b = msgp.AppendString(b, e.Key)
		b = msgp.AppendUint64(b, e.Gen)
	}
	return b
}

// appendCheck encodes Verify and Verified, which differ in tag and flag only.
func appendCheck(b []byte, tag, key, session, grant string, gen uint64, flag string, set bool) []byte {
	b = header(b, 3+msgpack.Count(session != "", grant != "", gen != 0, set), tag)
	b = msgp.AppendString(b, fieldV)
	b = msgp.AppendUint64(b, ExtensionVersion)
	b = msgpack.AppendStr(b, fieldKey, key)
	b = msgpack.OptionalStr(b, fieldSession, session)
	b = msgpack.OptionalStr(b, fieldGrant, grant)
	b = msgpack.OptionalUint(b, fieldGen, gen)
	return msgpack.OptionalTrue(b, flag, set)
}

func appendFerryRequest(b []byte, f *FerryRequest) []byte {
	parts := f.Compat != Compat{}
	b = msgp.AppendMapHeader(b, 1+msgpack.Count(f.Node != "", f.Epoch != 0, len(f.Planes) > 0, f.Sum, parts, f.Try != 0))
	b = appendV(b, f.V)
	b = msgpack.OptionalStr(b, fieldNode, f.Node)
	b = msgpack.OptionalUint(b, fieldEpoch, f.Epoch)
	if len(f.Planes) > 0 {
		b = msgp.AppendString(b, fieldPlanes)
		b = msgp.AppendArrayHeader(b, uint32(len(f.Planes)))
		for _, p := range f.Planes {
			b = msgp.AppendString(b, p)
		}
	}
	b = msgpack.OptionalTrue(b, fieldSum, f.Sum)
	if parts {
		c := f.Compat
		b = msgp.AppendString(b, fieldParts)
		b = msgp.AppendMapHeader(b, msgpack.Count(c.VLLMVersion != "", c.Model != "", c.Dtype != "", c.BlockBytes != 0))
		b = msgpack.OptionalStr(b, fieldVLLMVersion, c.VLLMVersion)
		b = msgpack.OptionalStr(b, fieldModel, c.Model)
		b = msgpack.OptionalStr(b, fieldDtype, c.Dtype)
		b = msgpack.OptionalInt(b, fieldBlockBytes, c.BlockBytes)
	}
	return msgpack.OptionalUint(b, fieldTry, f.Try)
}

func appendFerryAck(b []byte, f *FerryAck) []byte {
	b = msgp.AppendMapHeader(b, 1+msgpack.Count(f.Try != 0, f.Node != "", f.Epoch != 0, f.Gen != 0, f.Slot != 0, f.Grant != "", len(f.Extents) > 0,
		f.Rows != 0, f.Bytes != 0, f.LeaseMS != 0, f.Sum != nil, len(f.Planes) > 0, f.Local != ""))
	b = appendV(b, f.V)
	b = msgpack.OptionalUint(b, fieldTry, f.Try)
	b = msgpack.OptionalStr(b, fieldNode, f.Node)
	b = msgpack.OptionalUint(b, fieldEpoch, f.Epoch)
	b = msgpack.OptionalUint(b, fieldGen, f.Gen)
	b = msgpack.OptionalUint(b, fieldSlot, uint64(f.Slot))
	b = msgpack.OptionalStr(b, fieldGrant, f.Grant)
	if len(f.Extents) > 0 {
		b = msgp.AppendString(b, fieldExtents)
		b = msgp.AppendArrayHeader(b, uint32(len(f.Extents)))
		for _, e := range f.Extents {
			b = msgp.AppendArrayHeader(b, 2)
			b = msgp.AppendUint64(b, uint64(e[0]))
			b = msgp.AppendUint64(b, uint64(e[1]))
		}
	}
	b = msgpack.OptionalInt(b, fieldRows, f.Rows)
	b = msgpack.OptionalInt(b, fieldBytes, f.Bytes)
	b = msgpack.OptionalInt(b, fieldLease, f.LeaseMS)
	if f.Sum != nil {
		b = msgp.AppendString(b, fieldSum)
		b = msgp.AppendUint64(b, *f.Sum)
	}
	if len(f.Planes) > 0 {
		b = msgp.AppendString(b, fieldPlanes)
		b = msgp.AppendArrayHeader(b, uint32(len(f.Planes)))
		for i := range f.Planes {
			p := &f.Planes[i]
			b = msgp.AppendMapHeader(b, 1+msgpack.Count(len(p.Metadata) > 0, len(p.Token) > 0))
			b = msgpack.AppendStr(b, fieldName, p.Name)
			b = msgpack.OptionalBin(b, fieldMetadata, p.Metadata)
			b = msgpack.OptionalBin(b, fieldToken, p.Token)
		}
	}
	return msgpack.OptionalStr(b, fieldLocal, f.Local)
}

// room is at least the encoded size, names included.
func (f *FerryRequest) room() int {
	if f == nil {
		return 0
	}
	n := 192 + len(f.Node) + len(f.Compat.VLLMVersion) + len(f.Compat.Model) + len(f.Compat.Dtype)
	for _, p := range f.Planes {
		n += 5 + len(p)
	}
	return n
}

// room is at least the encoded size, names included.
func (f *FerryAck) room() int {
	if f == nil {
		return 0
	}
	n := 224 + len(f.Node) + len(f.Grant) + len(f.Local) + 11*len(f.Extents)
	for i := range f.Planes {
		p := &f.Planes[i]
		n += 40 + len(p.Name) + len(p.Metadata) + len(p.Token)
	}
	return n
}

func header(b []byte, fields uint32, tag string) []byte {
	b = msgp.AppendMapHeader(b, fields)
	return msgpack.AppendStr(b, fieldType, tag)
}

func appendV(b []byte, v int) []byte {
	if v == 0 {
		v = ExtensionVersion
	}
	b = msgp.AppendString(b, fieldV)
	return msgpack.AppendInt(b, int64(v))
}
