package api

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/ec"
)

// fields writes a msgpack map whose size is known only at its end: zero fields are left out. At most 15 fields.
type fields struct {
	b     []byte
	start int
}

const fixmap = 0x80 // a map of n <= 15 pairs is 0x80 + n

func openMap(b []byte) fields { return fields{b: append(b, fixmap), start: len(b)} }

func (f *fields) close() []byte { return f.b }

func (f *fields) key(k string) {
	f.b[f.start]++
	f.b = msgp.AppendString(f.b, k)
}

func (f *fields) str(k, v string) {
	if v != "" {
		f.key(k)
		f.b = msgp.AppendString(f.b, v)
	}
}

// text is str for words for people: cut to what the other end takes.
func (f *fields) text(k, v string) {
	if len(v) > maxText {
		v = v[:maxText-3] + "..."
	}
	f.str(k, strings.ToValidUTF8(v, "?"))
}

func (f *fields) bin(k string, v []byte) {
	if len(v) > 0 {
		f.key(k)
		f.b = msgp.AppendBytes(f.b, v)
	}
}

func (f *fields) uint(k string, v uint64) {
	if v != 0 {
		f.key(k)
		f.b = msgp.AppendUint64(f.b, v)
	}
}

func (f *fields) int(k string, v int64) {
	if v != 0 {
		f.key(k)
		f.b = msgp.AppendInt64(f.b, v)
	}
}

func (f *fields) bool(k string, v bool) {
	if v {
		f.key(k)
		f.b = msgp.AppendBool(f.b, v)
	}
}

func (f *fields) sum(has bool, v uint64) {
	if has {
		f.key("sum")
		f.b = msgp.AppendUint64(f.b, v)
	}
}

// AppendFrame appends m as one frame, its length in front. ErrLimit if it is larger than limit: b is then returned as it was.
func AppendFrame(b []byte, m Message, limit int) ([]byte, error) {
	start := len(b)
	b = append(b, 0, 0, 0, 0)
	switch m := m.(type) {
	case *Hello:
		b = m.append(b)
	case *Welcome:
		b = m.append(b)
	case *Refused:
		b = m.append(b)
	case *Request:
		b = m.append(b)
	case *Reply:
		b = m.append(b)
	case *Push:
		b = m.append(b)
	case *Bye:
		f := openMap(b)
		f.str("type", "bye")
		b = f.close()
	}
	size := len(b) - start - 4
	if size > limit {
		return b[:start], fmt.Errorf("%w: a frame of %d bytes, at most %d", ErrLimit, size, limit)
	}
	binary.BigEndian.PutUint32(b[start:], uint32(size))
	return b, nil
}

func (m *Hello) append(b []byte) []byte {
	f := openMap(b)
	f.str("type", "hello")
	f.int("version", int64(m.Version))
	f.int("min_version", int64(m.MinVersion))
	f.str("name", m.Name)
	f.str("pool", m.Pool)
	f.bin("token", m.Token)
	f.uint("epoch", m.Epoch)
	return f.close()
}

func (m *Welcome) append(b []byte) []byte {
	f := openMap(b)
	f.str("type", "welcome")
	f.int("version", int64(m.Version))
	f.str("node", m.Node)
	f.uint("epoch", m.Epoch)
	f.uint("conn", m.Conn)
	f.bin("token", m.Token)
	f.str("peer_host", m.PeerHost)
	f.int("peer_port", int64(m.PeerPort))
	f.int("generation", int64(m.Generation))
	f.key("pool")
	p := openMap(f.b)
	p.str("group", m.Pool.Group)
	p.str("model", m.Pool.Model)
	p.str("dtype", m.Pool.Dtype)
	p.str("vllm_version", m.Pool.VLLMVersion)
	p.int("block_bytes", m.Pool.BlockBytes)
	p.int("blocks", int64(m.Pool.Blocks))
	p.int("offset", m.Pool.Offset)
	p.str("region", m.Pool.Region)
	p.bool("checksums", m.Pool.Checksums)
	f.b = p.close()
	return f.close()
}

func (m *Refused) append(b []byte) []byte {
	f := openMap(b)
	f.str("type", "refused")
	f.str("code", string(m.Code))
	f.text("message", m.Message)
	return f.close()
}

func (m *Request) append(b []byte) []byte {
	f := openMap(b)
	f.str("type", "request")
	f.uint("id", m.ID)
	f.key("ops")
	f.b = msgp.AppendArrayHeader(f.b, uint32(len(m.Ops)))
	for i := range m.Ops {
		f.b = m.Ops[i].append(f.b)
	}
	f.bool("late", m.Late)
	return f.close()
}

func (o *Op) append(b []byte) []byte {
	f := openMap(b)
	f.str("op", o.Kind.String())
	f.str("key", o.Key)
	f.str("dtype", o.Dtype)
	f.ints("shape", o.Shape)
	f.int("bytes", o.Bytes)
	f.uint("handle", o.Handle)
	f.sum(o.HasSum, o.Sum)
	f.uint("ref", o.Ref)
	if len(o.ItemIndices) > 0 {
		f.key("item_indices")
		f.b = msgp.AppendArrayHeader(f.b, uint32(len(o.ItemIndices)))
		for _, v := range o.ItemIndices {
			f.b = msgp.AppendInt(f.b, v)
		}
	}
	f.bin("metadata", o.Metadata)
	f.bin("entry", o.Entry)
	f.int("timeout_ms", o.TimeoutMS)
	f.bool("map", o.Map)
	f.uint("gen", o.Gen)
	return f.close()
}

func (f *fields) ints(k string, v []int64) {
	if len(v) == 0 {
		return
	}
	f.key(k)
	f.b = msgp.AppendArrayHeader(f.b, uint32(len(v)))
	for _, n := range v {
		f.b = msgp.AppendInt64(f.b, n)
	}
}

func (m *Reply) append(b []byte) []byte {
	f := openMap(b)
	f.str("type", "reply")
	f.uint("id", m.ID)
	f.key("results")
	f.b = msgp.AppendArrayHeader(f.b, uint32(len(m.Results)))
	for i := range m.Results {
		f.b = m.Results[i].append(f.b)
	}
	return f.close()
}

func (r *Result) append(b []byte) []byte {
	f := openMap(b)
	f.str("code", string(r.Code))
	f.text("message", r.Message)
	f.uint("handle", r.Handle)
	f.info(r.Info)
	f.bin("entry", r.Entry)
	if r.Stats != nil {
		f.key("stats")
		f.b = appendStats(f.b, r.Stats)
	}
	return f.close()
}

func (f *fields) info(i *ec.Info) {
	if i != nil {
		f.key("info")
		f.b = appendInfo(f.b, i)
	}
}

func appendInfo(b []byte, i *ec.Info) []byte {
	f := openMap(b)
	f.str("key", i.Key)
	f.str("dtype", i.Spec.Dtype)
	f.ints("shape", i.Spec.Shape)
	f.int("bytes", i.Spec.Bytes)
	f.uint("state", uint64(i.State))
	f.uint("gen", i.Gen)
	f.int("slot", int64(i.Slot))
	if len(i.Extents) > 0 {
		f.key("extents")
		f.b = msgp.AppendArrayHeader(f.b, uint32(len(i.Extents)))
		for _, e := range i.Extents {
			f.b = msgp.AppendArrayHeader(f.b, 2)
			f.b = msgp.AppendUint32(f.b, e.Start)
			f.b = msgp.AppendUint32(f.b, e.Count)
		}
	}
	f.int("pins", int64(i.Pins))
	f.int("holds", int64(i.Holds))
	f.int("grants", int64(i.Grants))
	f.int("burned", int64(i.Burned))
	f.uint("owner", i.Owner)
	f.sum(i.HasChecksum, i.Checksum)
	return f.close()
}

// column is one counter of ec.Stats by its name on the wire: n or u is set.
type column struct {
	name string
	n    *int
	u    *uint64
}

func statColumns(s *ec.Stats) []column {
	return []column{
		{name: "blocks", n: &s.Blocks},
		{name: "free_blocks", n: &s.FreeBlocks},
		{name: "quarantined_blocks", n: &s.QuarantinedBlocks},
		{name: "filling_blocks", n: &s.FillingBlocks},
		{name: "pinned_blocks", n: &s.PinnedBlocks},
		{name: "held_blocks", n: &s.HeldBlocks},
		{name: "entries", n: &s.Entries},
		{name: "ready", n: &s.Ready},
		{name: "filling", n: &s.Filling},
		{name: "hits", u: &s.Hits},
		{name: "misses", u: &s.Misses},
		{name: "commits", u: &s.Commits},
		{name: "discards", u: &s.Discards},
		{name: "evictions", u: &s.Evictions},
		{name: "full", u: &s.Full},
		{name: "fragmented", u: &s.Fragmented},
	}
}

func appendStats(b []byte, s *ec.Stats) []byte {
	columns := statColumns(s)
	b = msgp.AppendMapHeader(b, uint32(len(columns)))
	for _, c := range columns {
		b = msgp.AppendString(b, c.name)
		if c.n != nil {
			b = msgp.AppendInt(b, *c.n)
		} else {
			b = msgp.AppendUint64(b, *c.u)
		}
	}
	return b
}

func (m *Push) append(b []byte) []byte {
	f := openMap(b)
	f.str("type", "push")
	f.uint("ref", m.Ref)
	f.str("event", eventNames[m.Event])
	f.bool("last", m.Last)
	f.str("code", string(m.Code))
	f.text("message", m.Message)
	f.uint("handle", m.Handle)
	f.str("outcome", m.Outcome)
	f.info(m.Info)
	f.int("bytes", m.Bytes)
	f.str("plane", m.Plane)
	f.int("elapsed_us", m.ElapsedUS)
	if len(m.Entries) > 0 {
		f.key("entries")
		f.b = msgp.AppendArrayHeader(f.b, uint32(len(m.Entries)))
		for i := range m.Entries {
			f.b = appendInfo(f.b, &m.Entries[i])
		}
	}
	return f.close()
}
