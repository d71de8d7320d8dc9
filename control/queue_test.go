package control

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The accounts of an outlet must match what Send accepted and has not been sent, whatever the order of things. There is no socket:
// sending is played by the test, on the fields that drain works on.
func TestOutletAcceptsUpToItsLimitsAndKeepsOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := &Options{Queue: rapid.IntRange(1, 5).Draw(t, "queue"), QueueBytes: rapid.Int64Range(1, 40).Draw(t, "bytes")}
		whole := total{limit: 1 << 20}
		all := total{whole: &whole, limit: 1 << 20}
		q := outlet{total: &all}
		var model []parcel
		var bytes int64
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				body := make([]byte, rapid.IntRange(0, 50).Draw(t, "size"))
				size := int64(len(body))
				var want error
				switch {
				case size > o.QueueBytes:
					want = ErrTooLarge
				case len(model) == o.Queue || bytes+size > o.QueueBytes:
					want = ErrQueueFull
				default:
					model, bytes = append(model, parcel{head: body}), bytes+size
				}
				if err := q.push(parcel{head: body}, o); !errors.Is(err, want) {
					t.Fatalf("push of %d bytes: %v, want %v", size, err, want)
				}
			},
			"clear": func(t *rapid.T) {
				if n := q.clear(); n != len(model) {
					t.Fatalf("%d cleared, want %d", n, len(model))
				}
				model, bytes = nil, 0
			},
			"": func(t *rapid.T) {
				if q.n != len(model) || q.bytes != bytes || all.bytes != bytes || whole.bytes != bytes {
					t.Fatalf("%d messages, %d bytes, %d in all: want %d, %d", q.n, q.bytes, all.bytes, len(model), bytes)
				}
			},
		})
	})
}

func TestAlarmsRingInOrderAndOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := time.Now()
		var as alarms
		all := make([]*alarm, 8)
		for i := range all {
			all[i] = &alarm{index: -1}
		}
		set := map[*alarm]time.Time{}
		now := start
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				al := rapid.SampledFrom(all).Draw(t, "alarm")
				at := now.Add(time.Duration(rapid.IntRange(-5, 20).Draw(t, "after")))
				as.set(al, at)
				set[al] = at
			},
			"stop": func(t *rapid.T) {
				al := rapid.SampledFrom(all).Draw(t, "alarm")
				as.stop(al)
				delete(set, al)
			},
			"ring": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 10).Draw(t, "passes")))
				last := time.Time{}
				for al := as.due(now); al != nil; al = as.due(now) {
					at, ok := set[al]
					if !ok || at.After(now) || at.Before(last) {
						t.Fatalf("rang for %v (set %v) after %v at %v", at, ok, last, now)
					}
					last = at
					delete(set, al)
				}
				for _, at := range set {
					if !at.After(now) {
						t.Fatalf("did not ring for %v at %v", at, now)
					}
				}
			},
			"": func(t *rapid.T) {
				for _, al := range all {
					if _, ok := set[al]; ok != (al.index >= 0) || len(as) != len(set) {
						t.Fatalf("%d alarms, want %d", len(as), len(set))
					}
				}
			},
		})
	})
}
