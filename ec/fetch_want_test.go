package ec

import (
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/tensorferry/tensorferry/ec/wire"
)

// V5, V15, C24.
func TestABadAnnouncementIsRefusedBeforeAnythingIsAllocated(t *testing.T) {
	refused := errors.New("not on the list")
	tests := []struct {
		name    string
		key     string
		change  func(a *Announcement)
		outcome Outcome
		err     error
	}{
		{"no address", "k", func(a *Announcement) { a.PeerHost, a.PeerPort = "", 0 }, FetchMissing, ErrMissing},
		{"no port", "k", func(a *Announcement) { a.PeerPort = 0 }, FetchFailed, ErrSpec},
		{"port 70000", "k", func(a *Announcement) { a.PeerPort = 70000 }, FetchFailed, ErrSpec},
		{"negative port", "k", func(a *Announcement) { a.PeerPort = -1 }, FetchFailed, ErrSpec},
		{"no host", "k", func(a *Announcement) { a.PeerHost = "" }, FetchFailed, ErrSpec},
		{"a host with a path", "k", func(a *Announcement) { a.PeerHost = "h/../x" }, FetchFailed, ErrSpec},
		{"a host with a port", "k", func(a *Announcement) { a.PeerHost = "h:80" }, FetchFailed, ErrSpec},
		{"a host with a space", "k", func(a *Announcement) { a.PeerHost = "a b" }, FetchFailed, ErrSpec},
		{"a host that is an option", "k", func(a *Announcement) { a.PeerHost = "-x" }, FetchFailed, ErrSpec},
		{"a long host", "k", func(a *Announcement) { a.PeerHost = strings.Repeat("a", 254) }, FetchFailed, ErrSpec},
		{"any address", "k", func(a *Announcement) { a.PeerHost = "0.0.0.0" }, FetchFailed, ErrSpec},
		{"any IPv6 address", "k", func(a *Announcement) { a.PeerHost = "::" }, FetchFailed, ErrSpec},
		{"a group address", "k", func(a *Announcement) { a.PeerHost = "224.0.0.1" }, FetchFailed, ErrSpec},
		{"a host not allowed", "k", func(a *Announcement) { a.PeerHost = "forbidden" }, FetchFailed, refused},
		{"no size", "k", func(a *Announcement) { a.SizeBytes = 0 }, FetchFailed, ErrSpec},
		{"negative size", "k", func(a *Announcement) { a.SizeBytes = -testBlock }, FetchFailed, ErrSpec},
		{"half a block", "k", func(a *Announcement) { a.SizeBytes = testBlock / 2 }, FetchFailed, ErrSpec},
		{"a block too many", "k", func(a *Announcement) { a.SizeBytes += testBlock }, FetchFailed, ErrSpec},
		{"a block too few", "k", func(a *Announcement) { a.SizeBytes -= testBlock }, FetchFailed, ErrSpec},
		{"a size near the end of int64", "k", func(a *Announcement) { a.SizeBytes = math.MaxInt64 &^ (testBlock - 1) }, FetchFailed, ErrSpec},
		{"the same without shape", "k", func(a *Announcement) { a.SizeBytes, a.Shape = math.MaxInt64&^(testBlock-1), nil }, FetchFailed, ErrTooLarge},
		{"a shape that overflows", "k", func(a *Announcement) { a.Shape = []int{math.MaxInt, math.MaxInt} }, FetchFailed, ErrSpec},
		{"one dimension", "k", func(a *Announcement) { a.Shape = []int{4} }, FetchFailed, ErrSpec},
		{"three dimensions", "k", func(a *Announcement) { a.Shape = []int{1, 4, 8} }, FetchFailed, ErrSpec},
		{"no rows", "k", func(a *Announcement) { a.Shape = []int{0, 8} }, FetchFailed, ErrSpec},
		{"negative shape", "k", func(a *Announcement) { a.Shape = []int{-4, -8} }, FetchFailed, ErrSpec},
		{"larger than the pool", "k", func(a *Announcement) { a.SizeBytes, a.Shape = 65*testBlock, []int{65, 8} }, FetchFailed, ErrTooLarge},
		{"no key", "", func(a *Announcement) {}, FetchFailed, ErrKey},
		{"a long key", strings.Repeat("k", wire.MaxKey+1), func(a *Announcement) {}, FetchFailed, ErrKey},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, pairOptions{consumer: func(o *ConsumerOptions) {
					o.AllowHost = func(host string) error {
						if host == "forbidden" {
							return refused
						}
						return nil
					}
				}})
				base := p.ccache.Stats()
				a := announced(4)
				tt.change(a)
				r := p.consumer.Fetch(bg, tt.key, a, 1)
				wantOutcome(t, r, tt.outcome)
				if !errors.Is(r.Err, tt.err) {
					t.Errorf("error %v, want %v", r.Err, tt.err)
				}
				if now := p.ccache.Stats(); now.FreeBlocks != base.FreeBlocks || now.Discards != 0 {
					t.Errorf("something was allocated: %+v", now)
				}
				if p.net.conns != 0 {
					t.Error("something was dialled")
				}
			})
		})
	}
}

func TestAPaddedLastBlockIsPartOfTheSizeOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{verify: true})
		// 3 rows of 6 elements of 2 bytes are 36 bytes: 3 blocks of 16, the last filled to a quarter.
		r, err := p.pcache.Reserve("img", Spec{Dtype: "torch.bfloat16", Shape: []int64{3, 6}, Bytes: 36}, 1)
		if err != nil {
			t.Fatal(err)
		}
		fill(t, r, "img")
		a := announced(3)
		a.Shape = []int{3, 6}
		got := p.consumer.Fetch(bg, "img", a, 1)
		wantOutcome(t, got, FetchReady)
		if got.Bytes != 36 {
			t.Errorf("%d bytes", got.Bytes)
		}
		wantBytes(t, p.ccache, "img")
	})
}
