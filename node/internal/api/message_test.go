package api

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/region"
)

func fullInfo() *ec.Info {
	return &ec.Info{
		Key: "k:1", Spec: ec.Spec{Dtype: "torch.bfloat16", Shape: []int64{3, 1 << 40}, Bytes: math.MaxInt64}, State: ec.Ready,
		Gen: math.MaxUint64, Slot: 7, Extents: []region.Extent{{Start: 0, Count: 1}, {Start: math.MaxUint32, Count: math.MaxUint32}},
		Pins: 2, Holds: 3, Owner: 9, Checksum: 0, HasChecksum: true, Grants: 4, Burned: 1,
	}
}

// samples are all messages, with every field set, and with none.
func samples() []Message {
	return []Message{
		&Hello{Version: 1, MinVersion: 1, Name: "engine 1", Pool: "abc", Token: []byte{1, 2}, Epoch: 5},
		&Hello{},
		&Welcome{Version: 1, Node: "n", Epoch: 3, Conn: 4, Token: []byte{9}, PeerHost: "10.0.0.1", PeerPort: 5601, Generation: 2,
			Pool: PoolInfo{Group: "g", Model: "m", Dtype: "torch.float16", VLLMVersion: "0.32.0", BlockBytes: 7168, Blocks: 10, Offset: 65536, Region: "/dev/shm/x", Checksums: true}},
		&Welcome{},
		&Refused{Code: CodeDenied, Message: "no"},
		&Request{ID: 1, Ops: []Op{
			{Kind: OpReserve, Key: "k", Dtype: "torch.bfloat16", Shape: []int64{2, 1024}, Bytes: 4096},
			{Kind: OpCommit, Handle: 1, HasSum: true, Sum: 0},
			{Kind: OpDiscard, Handle: 2},
			{Kind: OpAnnounce, Key: "k", ItemIndices: []int{0, 5}, Metadata: []byte(`{"a":1}`)},
			{Kind: OpFetch, Key: "k", Ref: 3, Entry: []byte(`{}`), TimeoutMS: 100, Map: true},
			{Kind: OpCancel, Ref: 3},
			{Kind: OpMap, Key: "k"},
			{Kind: OpRelease, Handle: 4},
			{Kind: OpLookup, Key: "k"},
			{Kind: OpWait, Key: "k", Ref: 5},
			{Kind: OpList, Ref: 6},
			{Kind: OpRemove, Key: "k"},
			{Kind: OpStats},
			{Kind: OpResume, Key: "k", Gen: 1 << 61},
			{Kind: OpRepin, Key: "k", Gen: 7},
			{Kind: OpRestated},
		}},
		&Request{ID: 2, Ops: []Op{}},
		&Reply{ID: math.MaxUint64, Results: []Result{
			{},
			{Code: CodeHeld, Message: "there"},
			{Handle: 5, Info: fullInfo()},
			{Entry: []byte("{}")},
			{Stats: &ec.Stats{Blocks: 1, FreeBlocks: 2, Hits: 3, Fragmented: math.MaxUint64}},
		}},
		&Push{Ref: 1, Event: EventFetched, Last: true, Code: CodeMissing, Message: "m", Handle: 7, Outcome: "missing", Info: fullInfo(), Bytes: 5, Plane: "tcp", ElapsedUS: 10},
		&Push{Ref: 1, Event: EventListed, Entries: []ec.Info{*fullInfo(), {Key: "b"}}},
		&Bye{},
	}
}

func TestMessagesSurviveEncodingAndDecoding(t *testing.T) {
	for _, m := range samples() {
		frame, err := AppendFrame([]byte("before"), m, MaxReplyFrame)
		if err != nil {
			t.Fatalf("%T: %v", m, err)
		}
		if n := binary.BigEndian.Uint32(frame[6:]); int(n) != len(frame)-10 {
			t.Errorf("%T: length %d of %d", m, n, len(frame)-10)
		}
		got, err := Decode(frame[10:])
		if err != nil {
			t.Fatalf("%T: %v", m, err)
		}
		if d := cmp.Diff(m, got); d != "" {
			t.Errorf("%T (-sent +received):\n%s", m, d)
		}
	}
}

func TestEveryTruncationIsMalformed(t *testing.T) {
	for _, m := range samples() {
		frame, err := AppendFrame(nil, m, MaxReplyFrame)
		if err != nil {
			t.Fatal(err)
		}
		for n := range len(frame) - 4 {
			if _, err := Decode(frame[4 : 4+n]); !errors.Is(err, ErrMalformed) {
				t.Fatalf("%T cut to %d bytes: %v", m, n, err)
			}
		}
		if _, err := Decode(append(frame[4:], 0xc0)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%T with a byte after it: %v", m, err)
		}
	}
}

// raw builds a map by hand.
func raw(pairs ...any) []byte {
	b := msgp.AppendMapHeader(nil, uint32(len(pairs)/2))
	for _, p := range pairs {
		switch p := p.(type) {
		case string:
			b = msgp.AppendString(b, p)
		case int:
			b = msgp.AppendInt(b, p)
		case []byte:
			b = append(b, p...)
		}
	}
	return b
}

func nested(depth int) []byte {
	return append(bytes.Repeat([]byte{0x91}, depth), 0xc0)
}

func TestForeignFramesAreToleratedOrRefused(t *testing.T) {
	ok := []struct {
		name  string
		frame []byte
	}{
		{"unknown fields", raw("type", "hello", "later", nested(5), "version", 1)},
		{"type last", raw("version", 1, "type", "hello")},
		{"a field twice", raw("type", "hello", "version", 2, "version", 1)},
		{"a wide int", raw("type", "hello", "version", []byte{0xd3, 0, 0, 0, 0, 0, 0, 0, 1})},
	}
	for _, c := range ok {
		m, err := Decode(c.frame)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if h, is := m.(*Hello); !is || h.Version != 1 {
			t.Errorf("%s: %+v", c.name, m)
		}
	}
	huge := []byte{0xdd, 0xff, 0xff, 0xff, 0xff} // an array of 4 billion
	bad := []struct {
		name  string
		frame []byte
	}{
		{"empty", nil},
		{"an array", []byte{0x90}},
		{"no type", raw("version", 1)},
		{"another type", raw("type", "later")},
		{"type not a string", raw("type", 1)},
		{"bin for a string", raw("type", "hello", "name", msgp.AppendBytes(nil, []byte("x")))},
		{"nil for an int", raw("type", "hello", "version", []byte{0xc0})},
		{"name that is not UTF-8", raw("type", "hello", "name", "\xff")},
		{"name too long", raw("type", "hello", "name", strings.Repeat("x", maxText+1))},
		{"token too long", raw("type", "hello", "token", msgp.AppendBytes(nil, make([]byte, maxToken+1)))},
		{"nested too deeply", raw("type", "hello", "later", nested(maxDepth))},
		{"promises more elements than bytes", raw("type", "request", "ops", huge)},
		{"promises more fields than bytes", []byte{0xdf, 0xff, 0xff, 0xff, 0xff}},
		{"unknown field promises more than there is", raw("type", "hello", "later", huge)},
		{"more operations than allowed", raw("type", "request", "ops", append(msgp.AppendArrayHeader(nil, MaxOps+1), bytes.Repeat([]byte{0x80}, MaxOps+1)...))},
		{"an op that is no map", raw("type", "request", "ops", []byte{0x91, 0x01})},
		{"a shape of nine", raw("type", "request", "ops", append([]byte{0x91}, raw("op", "reserve", "shape", append([]byte{0x99}, make([]byte, 9)...))...))},
		{"an extent of three", raw("type", "push", "info", raw("extents", []byte{0x91, 0x93, 1, 2, 3}))},
		{"an extent below 0", raw("type", "push", "info", raw("extents", []byte{0x91, 0x92, 0xff, 1}))},
	}
	for _, c := range bad {
		if m, err := Decode(c.frame); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %+v, %v; want ErrMalformed", c.name, m, err)
		}
	}
}

func TestAnOperationOfALaterVersionIsKnownAsUnknown(t *testing.T) {
	m, err := Decode(raw("type", "request", "id", 7, "ops", append([]byte{0x91}, raw("op", "teleport", "key", "k")...)))
	if err != nil {
		t.Fatal(err)
	}
	if r := m.(*Request); len(r.Ops) != 1 || r.Ops[0].Kind != OpUnknown || r.Ops[0].Key != "k" {
		t.Errorf("%+v", r)
	}
}

func TestALongTextIsCutAndStaysText(t *testing.T) {
	frame, err := AppendFrame(nil, &Refused{Code: CodeInternal, Message: strings.Repeat("ü", maxText) + "\xff"}, MaxReplyFrame)
	if err != nil {
		t.Fatal(err)
	}
	m, err := Decode(frame[4:])
	if err != nil {
		t.Fatal(err)
	}
	if r := m.(*Refused); !strings.HasPrefix(r.Message, "üüü") || len(r.Message) > maxText {
		t.Errorf("%d bytes", len(r.Message))
	}
}

func TestAFrameOverTheLimitIsNotBegun(t *testing.T) {
	before := []byte("before")
	got, err := AppendFrame(before, &Refused{Message: strings.Repeat("x", 1000)}, 500)
	if !errors.Is(err, ErrLimit) || string(got) != "before" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestErrorsKeepTheirSentinelOverTheWire(t *testing.T) {
	for _, c := range codeErrors {
		err := fmt.Errorf("around: %w", c.err)
		code := CodeOf(err)
		if code != c.code {
			t.Errorf("%v: code %q, want %q", c.err, code, c.code)
		}
		e := &Error{Op: "op", Key: "k", Code: code, Message: err.Error()}
		if !errors.Is(e, c.err) || !strings.Contains(e.Error(), err.Error()) {
			t.Errorf("%q does not unwrap to %v", e, c.err)
		}
	}
	if CodeOf(nil) != CodeOK || CodeOf(errors.New("x")) != CodeInternal {
		t.Error("codes of nil and of an unknown error")
	}
	if e := (&Error{Code: "later"}); !errors.Is(e, ErrInternal) {
		t.Error("a code of a later version is not an internal error")
	}
	if !errors.Is(&Error{Code: CodeTimeout}, context.DeadlineExceeded) {
		t.Error("timeout is not context.DeadlineExceeded")
	}
}

func TestSlipsOfACallerAreFoundBeforeSending(t *testing.T) {
	long := strings.Repeat("k", region.MaxKey+1)
	good := Op{Kind: OpReserve, Key: "k", Dtype: "torch.bfloat16", Shape: []int64{1, 2}, Bytes: 4}
	with := func(f func(*Op)) Op { o := good; f(&o); return o }
	for _, c := range []struct {
		name string
		op   Op
		want error
	}{
		{"good", good, nil},
		{"longest key", with(func(o *Op) { o.Key = long[1:] }), nil},
		{"no key", with(func(o *Op) { o.Key = "" }), ec.ErrKey},
		{"key too long", with(func(o *Op) { o.Key = long }), ec.ErrKey},
		{"key that is not UTF-8", with(func(o *Op) { o.Key = "\xff" }), ec.ErrKey},
		{"key with a NUL", with(func(o *Op) { o.Key = "a\x00" }), ec.ErrKey},
		{"no dtype", with(func(o *Op) { o.Dtype = "" }), ec.ErrSpec},
		{"dtype too long", with(func(o *Op) { o.Dtype = strings.Repeat("d", region.MaxDtype+1) }), ec.ErrSpec},
		{"no shape", with(func(o *Op) { o.Shape = nil }), ec.ErrSpec},
		{"a shape of five", with(func(o *Op) { o.Shape = make([]int64, 5) }), ec.ErrSpec},
		{"commit of nothing", Op{Kind: OpCommit}, ErrBadRequest},
		{"release of nothing", Op{Kind: OpRelease}, ErrBadRequest},
		{"fetch without a ref", Op{Kind: OpFetch, Key: "k", Entry: []byte("{}")}, ErrBadRequest},
		{"fetch without an entry", Op{Kind: OpFetch, Key: "k", Ref: 1}, ErrBadRequest},
		{"fetch with a long entry", Op{Kind: OpFetch, Key: "k", Ref: 1, Entry: make([]byte, MaxEntry+1)}, ErrLimit},
		{"wait for less than no time", Op{Kind: OpWait, Key: "k", Ref: 1, TimeoutMS: -1}, ErrBadRequest},
		{"metadata that is an array", Op{Kind: OpAnnounce, Key: "k", Metadata: []byte("[]")}, ErrBadRequest},
		{"metadata that is broken", Op{Kind: OpAnnounce, Key: "k", Metadata: []byte("{")}, ErrBadRequest},
		{"metadata that is blank", Op{Kind: OpAnnounce, Key: "k", Metadata: []byte("  ")}, ErrBadRequest},
		{"metadata too long", Op{Kind: OpAnnounce, Key: "k", Metadata: make([]byte, MaxMetadata+1)}, ErrLimit},
		{"item index below 0", Op{Kind: OpAnnounce, Key: "k", ItemIndices: []int{-1}}, ErrBadRequest},
		{"list", Op{Kind: OpList, Ref: 1}, nil},
	} {
		if err := c.op.Check(); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, m := range samples() {
		frame, err := AppendFrame(nil, m, MaxReplyFrame)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(frame[4:])
	}
	f.Add(raw("type", "hello", "later", nested(5)))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Decode(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatalf("%v is not ErrMalformed", err)
			}
			return
		}
		// What was accepted means the same when it is said again.
		frame, err := AppendFrame(nil, m, math.MaxInt)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Decode(frame[4:])
		if err != nil {
			t.Fatalf("%+v cannot be decoded again: %v", m, err)
		}
		if twice, _ := AppendFrame(nil, again, math.MaxInt); !bytes.Equal(frame, twice) {
			t.Fatalf("%+v became %+v", m, again)
		}
		if r, is := m.(*Request); is {
			for i := range r.Ops {
				_ = r.Ops[i].Check()
			}
		}
	})
}
