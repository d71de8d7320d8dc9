package omni

import (
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestAGoStageBetweenTwoRealOnes(t *testing.T) {
	e, s, r := newOurs(t, settings{}), newSender(t, nil, nil), newReceiver(t, nil)
	for name, v := range values() {
		got, err := e.Get(patient(t), stage.Request{Key: name, Metadata: s.put(name, describe(v))})
		must(t, err)
		p, err := e.Republish(patient(t), name, got, stage.PutOptions{})
		must(t, err)
		r.wants(getting(p), sizeOf(t, v), describe(theirs(v)))
		e.ended(p, stage.Read)
	}
	e.told()
	s.drained()
	r.idle()
}

func TestARealStageBetweenTwoGoOnes(t *testing.T) {
	e := newOurs(t, settings{})
	m := newPeer(t).open(ask{"host": "127.0.0.1", "zmq_port": 0, "stage_id": 1}, nil, nil) // no role: it receives and publishes
	for _, name := range []string{"tensor", "nested", "all dtypes", "object"} {
		v := theirs(values()[name])
		p := e.put(name, v, stage.PutOptions{})
		m.wants(getting(p), sizeOf(t, v), describe(v))
		e.ended(p, stage.Read)
		e.get(stage.Request{Key: name, Metadata: m.put(name, describe(v))}, describe(v))
	}
	m.drained()
}

// Replicas of a stage have the same keys; who reads names the one that it means with each request.
func TestReplicasWithTheSameKeysAreToldApart(t *testing.T) {
	const replicas = 4
	value := func(i, of int) tensor.Tensor { return raw(tensor.Int32, i*replicas+of, 25) }
	r, e := newReceiver(t, nil), newOurs(t, settings{getsOnly: true})
	var go4 [replicas]*ours
	var real4 [replicas]*peer
	for i := range replicas {
		go4[i], real4[i] = newOurs(t, settings{bytes: 1 << 20}), newSender(t, nil, nil)
	}
	for round := range 3 {
		key := fmt.Sprint("request_", round)
		var put [replicas]*stage.Published
		for i := range replicas {
			put[i] = go4[i].put(key, value(round, i), stage.PutOptions{})
			real4[i].put(key, describe(value(round, i)))
		}
		for i := replicas - 1; i >= 0; i-- {
			r.wants(getting(put[i]).with("metadata", at(go4[i].Endpoint())), 100, describe(value(round, i)))
			go4[i].ended(put[i], stage.Read)
			e.get(stage.Request{Key: key, From: real4[i].at}, describe(value(round, i)))
		}
	}
	for _, s := range real4 {
		s.drained()
	}
}
