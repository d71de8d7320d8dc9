package wire

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// pythonRequest is a request as Python prints it.
func pythonRequest(q *Request) string {
	return fmt.Sprintf("XferReq(mm_hash='%s', compatibility_hash='%s', session_id='%s', connector_version=%d)", q.Key, q.CompatHash, q.Session, q.Version)
}

// pythonAck is an ack with short fields as Python prints it.
func pythonAck(a *Ack) string {
	return fmt.Sprintf("XferAck(mm_hash='%s', status=<XferStatus.%v: %d>, session_id='%s', src_block_indices=%v, agent_metadata=b'%s', mem_descriptor=b'%s')",
		a.Key, a.Status, a.Status, a.Session, a.Blocks, a.AgentMetadata, a.MemDescriptor)
}

func TestToleranceIsThatOfThePeersDecoder(t *testing.T) {
	g := readGolden(t)
	for name, c := range g.ToleranceReq {
		m, err := DecodeAtProducer(c.Hex, Generation2)
		if c.Error != "" {
			if err == nil {
				t.Errorf("request, %s: accepted, the peers say %s", name, c.Error)
			}
		} else if err != nil {
			t.Errorf("request, %s: %v, the peers take it", name, err)
		} else if got := pythonRequest(m.(*Request)); got != c.Result {
			t.Errorf("request, %s: %s, want %s", name, got, c.Result)
		}
	}
	for name, c := range g.ToleranceAck {
		if name == "indices negative" {
			c.Error = "refused here: the peers' consumer fails on it one step later"
		}
		m, err := DecodeAtConsumer(c.Hex)
		if c.Error != "" {
			if err == nil {
				t.Errorf("ack, %s: accepted, want %s", name, c.Error)
			}
		} else if err != nil {
			t.Errorf("ack, %s: %v, the peers take it", name, err)
		} else if got := pythonAck(m.(*Ack)); got != c.Result {
			t.Errorf("ack, %s: %s, want %s", name, got, c.Result)
		}
	}
}

// pair is a field with its encoded value.
type pair struct {
	name  string
	value []byte
}

func str(s string) []byte { return msgp.AppendString(nil, s) }
func num(u uint64) []byte { return msgp.AppendUint64(nil, u) }

func message(pairs ...pair) []byte {
	b := msgp.AppendMapHeader(nil, uint32(len(pairs)))
	for _, p := range pairs {
		b = msgp.AppendString(b, p.name)
		b = append(b, p.value...)
	}
	return b
}

func bytesOf(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

// msgspec 0.23, the peers' decoder, was asked about each of these; a comment says where this package differs.
func TestRequestDecoderTakesWhatThePeersTake(t *testing.T) {
	key, compat := pair{"mm_hash", str("h")}, pair{"compatibility_hash", str("c")}
	version := func(hex string) []byte { return message(key, compat, pair{"connector_version", bytesOf(hex)}) }
	for _, c := range []struct {
		name  string
		frame []byte
		want  error
		says  string // part of the error
	}{
		{name: "a type twice", frame: message(pair{"type", str("req")}, key, compat, pair{"type", str("req")})},
		{name: "a second type that is wrong", frame: message(pair{"type", str("req")}, key, compat, pair{"type", str("ferry_verify")}), want: ErrMalformed, says: `type: "ferry_verify", want "req"`},
		{name: "type as bytes", frame: message(pair{"type", bytesOf("c403726571")}, key, compat), want: ErrMalformed, says: "type: want a string, got bin (byte 6)"},
		{name: "no key", frame: message(compat), want: ErrMalformed, says: "mm_hash is missing"},
		{name: "no hash", frame: message(key), want: ErrMalformed, says: "compatibility_hash is missing"},
		{name: "an empty key", frame: message(pair{"mm_hash", str("")}, compat)},
		{name: "no fields", frame: []byte{0x80}, want: ErrMalformed, says: "mm_hash is missing"},
		{name: "an earlier duplicate of a wrong type", frame: message(pair{"mm_hash", num(1)}, key, compat), want: ErrMalformed, says: "mm_hash: want a string, got int (byte 9)"},
		{name: "version in an int8", frame: version("d002")},
		{name: "version in an int64", frame: version("d30000000000000002")},
		{name: "version true", frame: version("c3"), want: ErrMalformed, says: "connector_version: want an integer, got bool"},
		{name: "version nil", frame: version("c0"), want: ErrMalformed, says: "want an integer, got nil"},
		{name: "version cut short", frame: version("cd00"), want: ErrMalformed, says: "connector_version: truncated"},
		{name: "an ext in an unknown field", frame: message(key, compat, pair{"x", bytesOf("d40501")})},
		{name: "a timestamp in an unknown field", frame: message(key, compat, pair{"x", bytesOf("d6ff01010101")})},
		{name: "integers as keys in an unknown field", frame: message(key, compat, pair{"x", bytesOf("810102")})},
		{name: "bad UTF-8 in an unknown field", frame: message(key, compat, pair{"x", bytesOf("a1ff")})},
		{name: "the unused byte in an unknown field", frame: message(key, compat, pair{"x", []byte{0xc1}}), want: ErrMalformed, says: "x: no msgpack value"},
		{name: "an integer as a field name", frame: append(append([]byte{0x83}, message(key, compat)[1:]...), 1, 1), want: ErrMalformed, says: "want a field name, got int"},
		{name: "bytes as a field name", frame: append(append([]byte{0x83}, message(key, compat)[1:]...), 0xc4, 1, 'x', 1), want: ErrMalformed, says: "want a field name, got bin"},
		{name: "bad UTF-8 in a field name", frame: message(key, compat, pair{"\xff", num(1)}), want: ErrMalformed, says: "not UTF-8"}, // the peers take it
		{name: "bad UTF-8 in the session", frame: message(key, compat, pair{"session_id", str("\xff")}), want: ErrMalformed, says: "session_id: a string that is not UTF-8"},
		{name: "an ack", frame: AppendAck(nil, &Ack{Key: "k"}), want: ErrMalformed, says: `type: "ack", want "req"`},
		{name: "a pickle, protocol 4", frame: []byte("\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."), want: ErrMalformed, says: "after the message"},
		{name: "a pickle, protocol 2", frame: []byte("\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R."), want: ErrMalformed, says: "after the message"},
		{name: "a pickle, protocol 0", frame: []byte("cposix\nsystem\n(S'id'\ntR."), want: ErrMalformed, says: "want a map, got int"},
		{name: "HTTP", frame: []byte("GET / HTTP/1.1\r\n\r\n"), want: ErrMalformed, says: "want a map"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := DecodeAtProducer(c.frame, Generation2)
			checkError(t, err, c.want, c.says)
		})
	}
}

func TestVersionOfAnySizeIsReadSoThatItCanBeRefused(t *testing.T) {
	for enc, want := range map[string]int{"ff": -1, "cfffffffffffffffff": math.MaxInt, "d38000000000000000": math.MinInt, "00": 0} {
		m, err := DecodeAtProducer(message(pair{"mm_hash", str("h")}, pair{"compatibility_hash", str("c")}, pair{"connector_version", bytesOf(enc)}), Generation2)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.(*Request).Version; got != want {
			t.Errorf("%s: %d, want %d", enc, got, want)
		}
	}
}

func TestAckDecoderRefusesWhatCannotBeUsed(t *testing.T) {
	key, status := pair{"mm_hash", str("h")}, pair{"status", num(0)}
	blocks := func(hex string) []byte { return message(key, status, pair{"src_block_indices", bytesOf(hex)}) }
	for _, c := range []struct {
		name  string
		frame []byte
		want  error
		says  string
	}{
		{name: "status -1", frame: message(key, pair{"status", bytesOf("ff")}), want: ErrMalformed, says: "status: want an integer from 0 up, got -1"},
		{name: "status 6", frame: message(key, pair{"status", num(6)}), want: ErrMalformed, says: "status: 6, at most 5"},
		{name: "status false", frame: message(key, pair{"status", bytesOf("c2")}), want: ErrMalformed, says: "got bool"},
		{name: "status in an int64", frame: message(key, pair{"status", bytesOf("d30000000000000001")})},
		{name: "no status", frame: message(key), want: ErrMalformed, says: "status is missing"},
		{name: "no key", frame: message(status), want: ErrMalformed, says: "mm_hash is missing"},
		{name: "block numbers to 2^31-1", frame: blocks("92ce7fffffff00")},
		{name: "block number 2^31", frame: blocks("92ce8000000000"), want: ErrMalformed, says: "src_block_indices: 2147483648"},
		{name: "block number -1", frame: blocks("9200ff"), want: ErrMalformed, says: "got -1 (byte 39)"},
		{name: "a float block number", frame: blocks("91cb0000000000000000"), want: ErrMalformed, says: "got float64"},
		{name: "nil for blocks", frame: blocks("c0"), want: ErrMalformed, says: "want an array, got nil"},
		{name: "an array for bytes", frame: message(key, status, pair{"agent_metadata", bytesOf("90")}), want: ErrMalformed, says: "agent_metadata: want bytes, got array"},
		{name: "a request", frame: AppendRequest(nil, &Request{Key: "k", CompatHash: "c"}, 2), want: ErrMalformed, says: `"req", want "ack"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := DecodeAtConsumer(c.frame)
			checkError(t, err, c.want, c.says)
		})
	}
}

func TestLastOfDuplicateBlockListsWins(t *testing.T) {
	list := func(n ...uint64) []byte {
		b := msgp.AppendArrayHeader(nil, uint32(len(n)))
		for _, u := range n {
			b = msgp.AppendUint64(b, u)
		}
		return b
	}
	m, err := DecodeAtConsumer(message(pair{"src_block_indices", list(1, 2, 3)}, pair{"mm_hash", str("h")}, pair{"src_block_indices", list(9, 8)}, pair{"status", num(0)}))
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(m.(*Ack).Blocks); got != "[9 8]" {
		t.Error(got)
	}
}

func checkError(t *testing.T, err, want error, says string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
	if err == nil {
		return
	}
	var f *FrameError
	if !errors.As(err, &f) {
		t.Errorf("%v is no *FrameError", err)
	}
	if !strings.Contains(err.Error(), says) {
		t.Errorf("got %q, want it to say %q", err, says)
	}
}
