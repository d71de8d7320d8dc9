package omni

import (
	"encoding/hex"
	"testing"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// sizeOf is what both ends say of a payload.
func sizeOf(t *testing.T, v tensor.Node) int64 {
	t.Helper()
	p, err := wire.Pack(v, wire.PackOptions{})
	must(t, err)
	_, n, err := p.Specs()
	must(t, err)
	return n
}

func TestARealReaderGetsWhatGoPut(t *testing.T) {
	e := newOurs(t, settings{})
	for name, mode := range map[string]struct {
		config ask
		how    func(p *stage.Published) ask
	}{
		"by metadata":            {nil, getting},
		"by endpoint":            {nil, func(p *stage.Published) ask { return getting(p).with("metadata", at(e.Endpoint())) }},
		"by configuration":       {ask{"sender_host": e.Endpoint().Host, "sender_zmq_port": e.Endpoint().Port}, func(p *stage.Published) ask { return getting(p).with("metadata", nil) }},
		"by a deadline":          {nil, func(p *stage.Published) ask { return getting(p).with("deadline", 20) }},
		"by endpoint in no time": {nil, func(p *stage.Published) ask { return getting(p).with("metadata", at(e.Endpoint())).with("deadline", 2) }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReceiver(t, mode.config)
			for what, v := range values() {
				p := e.put(what, v, stage.PutOptions{})
				r.wants(mode.how(p), sizeOf(t, v), describe(theirs(v)))
				e.ended(p, stage.Read)
			}
			r.idle()
		})
	}
}

func TestARealReaderGetsLargePayloads(t *testing.T) {
	e := newOurs(t, settings{bytes: 192 << 20})
	r := newReceiver(t, nil)
	layers := make(list, 50)
	for i := range layers {
		layers[i] = raw(tensor.Float32, i, 16384)
	}
	for name, v := range map[string]tensor.Node{
		"64 MiB": raw(tensor.Float32, 3, 16<<20), "50 leaves": dict{field("layers", layers), field("raw", tensor.Bytes(make([]byte, 1<<20)))},
		"an object of 16 MiB": dict{field("b", tensor.Bytes(raw(tensor.Uint8, 1, 16<<20).Data()))},
	} {
		p := e.put(name, v, stage.PutOptions{})
		r.wants(getting(p), sizeOf(t, v), describe(v))
		e.ended(p, stage.Read)
	}
}

// What the peers lose on the way arrives, if the put asks for that.
func TestARealReaderGetsExactlyWhatWasPutIfAsked(t *testing.T) {
	e := newOurs(t, settings{})
	r := newReceiver(t, nil)
	for _, name := range []string{"list of one", "tuple", "tuple of one", "object", "empty tuple"} {
		v := values()[name]
		p := e.put(name, v, stage.PutOptions{Pack: wire.PackOptions{Exact: true}})
		got := r.do(getting(p))
		same(t, name, got.Value, describe(v))
		e.ended(p, stage.Read)
	}
}

// O5: what put returns says where nothing is.
func TestTheMetadataOfAPutIsNoUseWithoutAClaim(t *testing.T) {
	e := newOurs(t, settings{})
	r := newReceiver(t, unhurried)
	p := e.put("k", values()["tensor"], stage.PutOptions{})
	h, err := wire.DecodeHandoff(p.Metadata)
	must(t, err)
	if h.Legacy != nil {
		t.Error("it can be read without a claim")
	}
	q := getting(p)
	r.fails(q.with("key", "another key"))
	r.wants(getting(p).with("metadata", hex.EncodeToString(p.Metadata)), 128, describe(values()["tensor"]))
	e.ended(p, stage.Read)
}
