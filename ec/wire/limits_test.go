package wire

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// header32 is a msgpack header with a 32-bit length of 2^32-1.
func header32(first byte) []byte { return []byte{first, 0xff, 0xff, 0xff, 0xff} }

// nested is a request with arrays in one another in an unknown field: 1.2 KB of it end a vLLM producer (its decoder recurses).
func nested(depth int) []byte {
	return message(pair{"mm_hash", str("h")}, pair{"compatibility_hash", str("c")}, pair{"x", append(bytes.Repeat([]byte{0x91}, depth), 0xc0)})
}

var hostile = map[string]struct {
	frame []byte
	want  error
}{
	"a map of 4 billion fields":       {header32(0xdf), ErrMalformed},
	"an array of 4 billion":           {header32(0xdd), ErrMalformed},
	"1.2 KB of nested arrays":         {nested(1200), ErrLimit},
	"60 KB of nested arrays":          {nested(60_000), ErrLimit},
	"nested maps":                     {message(pair{"x", append(bytes.Repeat([]byte{0x81, 0x01}, 500), 0xc0)}), ErrLimit},
	"a nested array of 4 billion":     {message(pair{"x", append([]byte{0x91}, header32(0xdd)...)}), ErrMalformed},
	"a nested map of 4 billion":       {message(pair{"x", header32(0xdf)}), ErrMalformed},
	"a string of 4 GiB that is short": {message(pair{"mm_hash", header32(0xdb)}), ErrMalformed},
	"bytes of 4 GiB that are short":   {message(pair{"x", header32(0xc6)}), ErrMalformed},
	"an ext of 4 GiB that is short":   {message(pair{"x", header32(0xc9)}), ErrMalformed},
	"a field name of 4 GiB":           {append([]byte{0x81}, header32(0xdb)...), ErrMalformed},
	"a key over the limit":            {message(pair{"mm_hash", str(strings.Repeat("k", MaxKey+1))}), ErrLimit},
	"a session over the limit":        {message(pair{"session_id", str(strings.Repeat("s", MaxSession+1))}), ErrLimit},
	"an extension cut short":          {message(pair{"ferry", bytesOf("82a17601")}), ErrMalformed},
	"nothing":                         {nil, ErrMalformed},
}

var hostileAcks = map[string]struct {
	frame []byte
	want  error
}{
	"4 billion blocks":               {message(pair{"type", str("ack")}, pair{"src_block_indices", header32(0xdd)}), ErrLimit},
	"a million blocks that are gone": {message(pair{"src_block_indices", bytesOf("dd000f4240")}), ErrMalformed},
	"blocks over the limit":          {message(pair{"src_block_indices", append(bytesOf("dd000f4241"), make([]byte, MaxBlocksAck+1)...)}), ErrLimit},
	"4 GiB of metadata":              {message(pair{"agent_metadata", header32(0xc6)}), ErrMalformed},
	"a verified over its limit":      {message(pair{"type", str("ferry_verified")}, pair{"x", msgp.AppendBytes(nil, make([]byte, MaxRequest))}), ErrLimit},
}

func TestHostileFramesAreRefusedBeforeMemoryIsTaken(t *testing.T) {
	megabyteKey := message(pair{"type", str("req")}, pair{"mm_hash", str(strings.Repeat("k", 1<<20))}, pair{"compatibility_hash", str("c")})
	check := func(name string, want error, decode func() error) {
		t.Helper()
		if err := decode(); !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", name, err, want)
		}
		// What an error costs; nothing may grow with what the frame claims.
		if got := allocated(decode); got > 2048 {
			t.Errorf("%s: %d bytes allocated", name, got)
		}
	}
	producer := func(b []byte) func() error {
		return func() error { _, err := DecodeAtProducer(b, 2); return err }
	}
	consumer := func(b []byte) func() error {
		return func() error { _, err := DecodeAtConsumer(b); return err }
	}
	for name, c := range hostile {
		check("at the producer, "+name, c.want, producer(c.frame))
		check("at the consumer, "+name, c.want, consumer(c.frame))
	}
	for name, c := range hostileAcks {
		check("at the consumer, "+name, c.want, consumer(c.frame))
	}
	check("a request with a key of 1 MB", ErrLimit, producer(megabyteKey))
	check("an ack with a key of 1 MB", ErrLimit, consumer(message(pair{"mm_hash", str(strings.Repeat("k", 1<<20))}, pair{"status", num(0)})))
	check("a request over its limit", ErrLimit, producer(make([]byte, MaxRequest+1)))
	check("an ack over its limit", ErrLimit, consumer(make([]byte, MaxFrame+1)))
	check("descriptors that are gone", ErrMalformed, func() error { _, err := DecodeMemDescriptor(bytesOf("dd000f4240"), MaxBlocksAck); return err })
	check("4 billion descriptors", ErrLimit, func() error { _, err := DecodeMemDescriptor(header32(0xdd), MaxBlocksAck); return err })
	megabyte := make([]byte, 1<<20)
	check("a notification of 1 MB", ErrLimit, func() error { _, _, err := ParseNotification(megabyte); return err })
}

// allocated is the least number of bytes that f allocates in a few tries: another goroutine may allocate in some of them.
func allocated(f func() error) uint64 {
	least := ^uint64(0)
	for range 5 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_ = f()
		runtime.ReadMemStats(&after)
		least = min(least, after.TotalAlloc-before.TotalAlloc)
	}
	return least
}

func TestLargestMessagesWithinTheLimitsAreTaken(t *testing.T) {
	q := fullRequest()
	q.Key, q.Session, q.CompatHash = strings.Repeat("k", MaxKey), strings.Repeat("s", MaxSession), strings.Repeat("c", MaxHash)
	if _, err := DecodeAtProducer(AppendRequest(nil, q, 2), 2); err != nil {
		t.Error(err)
	}
	a := &Ack{Key: q.Key, Session: q.Session, Blocks: make([]uint32, MaxBlocksAck), MemDescriptor: AppendMemDescriptor(nil, 0x7f0000000000, MaxBlocksAck, 7168)}
	m, err := DecodeAtConsumer(AppendAck(nil, a))
	if err != nil {
		t.Fatal(err)
	}
	if got := m.(*Ack); len(got.Blocks) != MaxBlocksAck || !bytes.Equal(got.MemDescriptor, a.MemDescriptor) {
		t.Error("an ack at the limits came back changed")
	}
	if _, err := DecodeAtProducer(nested(MaxDepth-1), 2); err != nil {
		t.Error(err)
	}
	if _, err := DecodeAtProducer(nested(MaxDepth), 2); !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
}

func TestEveryTruncationOfAMessageIsMalformed(t *testing.T) {
	request, ack := AppendRequest(nil, fullRequest(), 1), AppendAck(nil, fullAck())
	for n := range request {
		if _, err := DecodeAtProducer(request[:n], 1); !errors.Is(err, ErrMalformed) {
			t.Errorf("%d bytes of a request: %v", n, err)
		}
	}
	for n := range ack {
		if _, err := DecodeAtConsumer(ack[:n]); !errors.Is(err, ErrMalformed) {
			t.Errorf("%d bytes of an ack: %v", n, err)
		}
	}
}

func TestEncodingIntoABufferWithRoomAllocatesNothing(t *testing.T) {
	own, nack, request := fullAck(), &Ack{Key: "k", Status: NackMissing}, fullRequest()
	own.Blocks, own.AgentMetadata, own.MemDescriptor = nil, nil, nil
	buf := make([]byte, 0, 1024)
	for name, f := range map[string]func(){
		"ack to an own peer": func() { buf = AppendAck(buf[:0], own) },
		"NACK":               func() { buf = AppendAck(buf[:0], nack) },
		"request":            func() { buf = AppendRequest(buf[:0], request, 2) },
		"verify":             func() { buf = AppendVerify(buf[:0], &Verify{Key: "k", Grant: "g"}) },
		"verified":           func() { buf = AppendVerified(buf[:0], &Verified{Key: "k", Grant: "g"}) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
	// One, but slices.Grow itself takes two under the race detector.
	if n := testing.AllocsPerRun(100, func() { _ = AppendAck(nil, own) }); n > 2 {
		t.Errorf("ack into no buffer: %v allocations", n)
	}
}

func TestWhatIsDecodedSharesNoMemoryWithTheFrame(t *testing.T) {
	b := AppendAck(nil, fullAck())
	m, err := DecodeAtConsumer(b)
	if err != nil {
		t.Fatal(err)
	}
	again, _ := DecodeAtConsumer(bytes.Clone(b))
	clear(b)
	if got, want := AppendAck(nil, m.(*Ack)), AppendAck(nil, again.(*Ack)); !bytes.Equal(got, want) {
		t.Error("the ack changed with its frame")
	}
}
