package ec

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

func TestIndexFindsWhatIsInAndNothingElse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.IntRange(1, 9).Draw(t, "slots")
		crowd := rapid.Uint32Range(1, 16).Draw(t, "hashes") // so few that keys share them, all about the end of the table
		bySlot := make([]*entry, slots)
		x := newIndex(bySlot)
		hash := func(key string) uint32 { return x.hash(key)%crowd - crowd/2 }
		in := map[string]*entry{}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				key := fmt.Sprint(rapid.IntRange(0, 20).Draw(t, "key"))
				slot := rapid.IntRange(0, slots-1).Draw(t, "slot")
				if in[key] != nil || bySlot[slot] != nil {
					t.Skip()
				}
				e := &entry{key: key, slot: slot}
				bySlot[slot], in[key] = e, e
				x.put(e, hash(key))
			},
			"remove": func(t *rapid.T) {
				e := bySlot[rapid.IntRange(0, slots-1).Draw(t, "slot")]
				if e == nil {
					t.Skip()
				}
				x.remove(e)
				bySlot[e.slot] = nil
				delete(in, e.key)
			},
			"": func(t *rapid.T) {
				for k := range 21 {
					key := fmt.Sprint(k)
					if got := x.get(key, hash(key)); got != in[key] {
						t.Fatalf("%q: %+v, want %+v", key, got, in[key])
					}
				}
				if x.len != len(in) {
					t.Fatalf("%d, want %d", x.len, len(in))
				}
			},
		})
	})
}
