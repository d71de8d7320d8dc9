package api

import (
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/region"
)

// Decode reads one frame's payload. Nothing in the message refers to b. What is wrong with b is an ErrMalformed.
func Decode(b []byte) (Message, error) {
	kind, err := typeOf(b)
	if err != nil {
		return nil, err
	}
	r := &reader{b: b}
	var m Message
	switch kind {
	case "hello":
		m = r.hello()
	case "welcome":
		m = r.welcome()
	case "refused":
		m = r.refused()
	case "request":
		m = r.request()
	case "reply":
		m = r.reply()
	case "push":
		m = r.push()
	case "bye":
		m = &Bye{}
		r.object(func([]byte) bool { return false })
	default:
		return nil, fmt.Errorf("%w: type %q", ErrMalformed, kind)
	}
	if r.err != nil {
		return nil, r.err
	}
	if len(r.b) != 0 {
		return nil, fmt.Errorf("%w: %d bytes after the message", ErrMalformed, len(r.b))
	}
	return m, nil
}

// typeOf finds the field "type": first in every frame of ours, anywhere in another's.
func typeOf(b []byte) (string, error) {
	r := &reader{b: b}
	n, rest, err := msgp.ReadMapHeaderBytes(b)
	for left := r.count(n, rest, err, 2, maxFields); left > 0 && r.err == nil; left-- {
		k, rest, err := msgp.ReadStringZC(r.b)
		if !r.take(rest, err) {
			break
		}
		if string(k) == "type" {
			kind := r.str(32)
			return kind, r.err
		}
		r.skip(maxDepth)
	}
	if r.err == nil {
		r.fail("no type")
	}
	return "", r.err
}

func (r *reader) hello() *Hello {
	m := &Hello{}
	r.object(func(key []byte) bool {
		switch string(key) {
		case "version":
			m.Version = r.int32()
		case "min_version":
			m.MinVersion = r.int32()
		case "name":
			m.Name = r.str(maxText)
		case "pool":
			m.Pool = r.str(maxText)
		case "token":
			m.Token = r.bin(maxToken)
		case "epoch":
			m.Epoch = r.uint()
		default:
			return false
		}
		return true
	})
	return m
}

func (r *reader) welcome() *Welcome {
	m := &Welcome{}
	r.object(func(key []byte) bool {
		switch string(key) {
		case "version":
			m.Version = r.int32()
		case "node":
			m.Node = r.str(maxText)
		case "epoch":
			m.Epoch = r.uint()
		case "conn":
			m.Conn = r.uint()
		case "token":
			m.Token = r.bin(maxToken)
		case "peer_host":
			m.PeerHost = r.str(maxText)
		case "peer_port":
			m.PeerPort = r.int32()
		case "generation":
			m.Generation = r.int32()
		case "pool":
			r.pool(&m.Pool)
		default:
			return false
		}
		return true
	})
	return m
}

func (r *reader) pool(p *PoolInfo) {
	r.object(func(key []byte) bool {
		switch string(key) {
		case "group":
			p.Group = r.str(maxText)
		case "model":
			p.Model = r.str(maxText)
		case "dtype":
			p.Dtype = r.str(maxText)
		case "vllm_version":
			p.VLLMVersion = r.str(maxText)
		case "block_bytes":
			p.BlockBytes = r.int()
		case "blocks":
			p.Blocks = r.int32()
		case "offset":
			p.Offset = r.int()
		case "region":
			p.Region = r.str(maxText)
		case "checksums":
			p.Checksums = r.bool()
		default:
			return false
		}
		return true
	})
}

func (r *reader) refused() *Refused {
	m := &Refused{}
	r.object(func(key []byte) bool {
		switch string(key) {
		case "code":
			m.Code = Code(r.str(64))
		case "message":
			m.Message = r.str(maxText)
		default:
			return false
		}
		return true
	})
	return m
}

func (r *reader) request() *Request {
	m := &Request{}
	r.object(func(key []byte) bool {
		switch string(key) {
		case "id":
			m.ID = r.uint()
		case "ops":
			n := r.array(1, MaxOps)
			m.Ops = make([]Op, n)
			for i := 0; i < n && r.err == nil; i++ {
				r.op(&m.Ops[i])
			}
		case "late":
			m.Late = r.bool()
		default:
			return false
		}
		return true
	})
	return m
}

func (r *reader) op(o *Op) {
	r.object(func(key []byte) bool {
		switch string(key) {
		case "op":
			o.Kind = r.kind()
		case "key":
			o.Key = r.raw(maxText)
		case "dtype":
			o.Dtype = r.raw(maxText)
		case "shape":
			o.Shape = r.shape()
		case "bytes":
			o.Bytes = r.int()
		case "handle":
			o.Handle = r.uint()
		case "sum":
			o.Sum, o.HasSum = r.uint(), true
		case "ref":
			o.Ref = r.uint()
		case "item_indices":
			n := r.array(1, MaxItemIndices)
			o.ItemIndices = make([]int, n)
			for i := 0; i < n && r.err == nil; i++ {
				o.ItemIndices[i] = r.int32()
			}
		case "metadata":
			o.Metadata = r.bin(MaxMetadata)
		case "entry":
			o.Entry = r.bin(MaxEntry)
		case "timeout_ms":
			o.TimeoutMS = r.int()
		case "map":
			o.Map = r.bool()
		case "gen":
			o.Gen = r.uint()
		default:
			return false
		}
		return true
	})
}

func (r *reader) kind() Kind {
	v := r.str(32)
	for k := OpUnknown + 1; k < kinds; k++ {
		if kindNames[k] == v {
			return k
		}
	}
	return OpUnknown
}

func (r *reader) shape() []int64 {
	n := r.array(1, maxDims)
	v := make([]int64, n)
	for i := 0; i < n && r.err == nil; i++ {
		v[i] = r.int()
	}
	return v
}

func (r *reader) reply() *Reply {
	m := &Reply{}
	r.object(func(key []byte) bool {
		switch string(key) {
		case "id":
			m.ID = r.uint()
		case "results":
			n := r.array(1, MaxOps)
			m.Results = make([]Result, n)
			for i := 0; i < n && r.err == nil; i++ {
				r.result(&m.Results[i])
			}
		default:
			return false
		}
		return true
	})
	return m
}

func (r *reader) result(v *Result) {
	r.object(func(key []byte) bool {
		switch string(key) {
		case "code":
			v.Code = Code(r.str(64))
		case "message":
			v.Message = r.str(maxText)
		case "handle":
			v.Handle = r.uint()
		case "info":
			v.Info = &ec.Info{}
			r.info(v.Info)
		case "entry":
			v.Entry = r.bin(MaxReplyFrame)
		case "stats":
			v.Stats = &ec.Stats{}
			r.stats(v.Stats)
		default:
			return false
		}
		return true
	})
}

func (r *reader) info(v *ec.Info) {
	r.object(func(key []byte) bool {
		switch string(key) {
		case "key":
			v.Key = r.str(maxText)
		case "dtype":
			v.Spec.Dtype = r.str(maxText)
		case "shape":
			v.Spec.Shape = r.shape()
		case "bytes":
			v.Spec.Bytes = r.int()
		case "state":
			v.State = ec.State(min(r.uint(), math.MaxUint8))
		case "gen":
			v.Gen = r.uint()
		case "slot":
			v.Slot = r.int32()
		case "extents":
			n := r.array(3, region.MaxExtents)
			v.Extents = make([]region.Extent, n)
			for i := 0; i < n && r.err == nil; i++ {
				if r.array(1, 2) != 2 {
					r.fail("an extent is [start, count]")
				}
				v.Extents[i] = region.Extent{Start: r.uint32(), Count: r.uint32()}
			}
		case "pins":
			v.Pins = r.int32()
		case "holds":
			v.Holds = r.int32()
		case "grants":
			v.Grants = r.int32()
		case "burned":
			v.Burned = r.int32()
		case "owner":
			v.Owner = r.uint()
		case "sum":
			v.Checksum, v.HasChecksum = r.uint(), true
		default:
			return false
		}
		return true
	})
}

func (r *reader) stats(s *ec.Stats) {
	columns := statColumns(s)
	r.object(func(key []byte) bool {
		for _, c := range columns {
			switch {
			case c.name != string(key):
			case c.n != nil:
				*c.n = r.int32()
				return true
			default:
				*c.u = r.uint()
				return true
			}
		}
		return false
	})
}

func (r *reader) push() *Push {
	m := &Push{}
	r.object(func(key []byte) bool {
		switch string(key) {
		case "ref":
			m.Ref = r.uint()
		case "event":
			v := r.str(32)
			for e := EventUnknown + 1; e < events; e++ {
				if eventNames[e] == v {
					m.Event = e
				}
			}
		case "last":
			m.Last = r.bool()
		case "code":
			m.Code = Code(r.str(64))
		case "message":
			m.Message = r.str(maxText)
		case "outcome":
			m.Outcome = r.str(64)
		case "handle":
			m.Handle = r.uint()
		case "info":
			m.Info = &ec.Info{}
			r.info(m.Info)
		case "bytes":
			m.Bytes = r.int()
		case "plane":
			m.Plane = r.str(64)
		case "elapsed_us":
			m.ElapsedUS = r.int()
		case "entries":
			n := r.array(1, MaxListChunk)
			m.Entries = make([]ec.Info, n)
			for i := 0; i < n && r.err == nil; i++ {
				r.info(&m.Entries[i])
			}
		default:
			return false
		}
		return true
	})
	return m
}
