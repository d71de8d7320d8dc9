package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// golden is interop/golden/ec.json: what vLLM 0.32 itself wrote, and what its decoders said.
type golden struct {
	Messages map[string]struct {
		Fields struct {
			Key        string   `json:"mm_hash"`
			CompatHash string   `json:"compatibility_hash"`
			Session    string   `json:"session_id"`
			Version    int      `json:"connector_version"`
			Status     *Status  `json:"status"`
			Blocks     []uint32 `json:"src_block_indices"`
			Agent      hexBytes `json:"agent_metadata"`
			Mem        hexBytes `json:"mem_descriptor"`
		} `json:"fields"`
		Hex hexBytes `json:"hex"`
	} `json:"messages"`
	StatusCodes   map[string]Status    `json:"status_codes"`
	Retryable     []string             `json:"retryable"`
	ToleranceReq  map[string]tolerance `json:"tolerance_req"`
	ToleranceAck  map[string]tolerance `json:"tolerance_ack"`
	MemDescriptor []struct {
		Base      uint64      `json:"base"`
		Blocks    int         `json:"num_blocks"`
		BlockSize int64       `json:"block_size"`
		Descs     [][3]uint64 `json:"descs"`
		Hex       hexBytes    `json:"hex"`
	} `json:"mem_descriptor"`
	Notif struct {
		Session string   `json:"session_id"`
		Key     string   `json:"mm_hash"`
		Hex     hexBytes `json:"hex"`
	} `json:"notif"`
	CompatHash []struct {
		VLLMVersion string `json:"vllm_version"`
		Model       string `json:"model"`
		Dtype       string `json:"dtype"`
		BlockBytes  int64  `json:"block_size_bytes"`
		JSON        string `json:"json"`
		SHA256      string `json:"sha256"`
	} `json:"compat_hash"`
	ParamsExamples map[string]struct {
		Returned [2]json.RawMessage `json:"returned"`
	} `json:"ec_transfer_params_examples"`
	Params  json.RawMessage `json:"ec_transfer_params"`
	Capture []struct {
		ToProducer capture `json:"c2p"`
		ToConsumer capture `json:"p2c"`
	} `json:"zmtp_session"`
	Decoded struct {
		Acks []struct {
			Key     string      `json:"mm_hash"`
			Status  Status      `json:"status"`
			Session string      `json:"session_id"`
			Blocks  []uint32    `json:"src_block_indices"`
			Agent   hexBytes    `json:"agent_metadata_hex"`
			Mem     [][3]uint64 `json:"mem_descriptor"`
		} `json:"acks"`
		Reqs []string `json:"reqs"`
	} `json:"wire_decoded"`
}

type tolerance struct {
	Hex    hexBytes `json:"hex"`
	Result string   `json:"result"`
	Error  string   `json:"error"`
}

type capture struct {
	Frames []struct {
		Flags int      `json:"flags"`
		Hex   hexBytes `json:"hex"`
	} `json:"frames"`
}

// payloads are the msgpack frames of a captured connection: no commands, no empty delimiters.
func (c capture) payloads() (p [][]byte) {
	const zmtpCommand = 4
	for _, f := range c.Frames {
		if f.Flags&zmtpCommand == 0 && len(f.Hex) > 0 {
			p = append(p, f.Hex)
		}
	}
	return p
}

type hexBytes []byte

func (h *hexBytes) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

func readGolden(t testing.TB) *golden {
	t.Helper()
	b, err := os.ReadFile("../../interop/golden/ec.json")
	if err != nil {
		t.Fatal(err)
	}
	g := new(golden)
	if err := json.Unmarshal(b, g); err != nil {
		t.Fatal(err)
	}
	return g
}

func TestMessagesAreByteEqualToThePeersBothWays(t *testing.T) {
	g := readGolden(t)
	if len(g.Messages) < 12 {
		t.Fatalf("%d golden messages, want 12", len(g.Messages))
	}
	for name, m := range g.Messages {
		t.Run(name, func(t *testing.T) {
			f := m.Fields
			var want, got Message
			var encoded []byte
			var err error
			if f.Status == nil {
				q := &Request{Key: f.Key, CompatHash: f.CompatHash, Session: f.Session, Version: f.Version}
				want, encoded = q, AppendRequest(nil, q, Generation2)
				got, err = DecodeAtProducer(m.Hex, Generation2)
			} else {
				a := &Ack{Key: f.Key, Status: *f.Status, Session: f.Session, Blocks: f.Blocks, AgentMetadata: f.Agent, MemDescriptor: f.Mem}
				for _, p := range []*[]byte{&a.AgentMetadata, &a.MemDescriptor} {
					if len(*p) == 0 {
						*p = nil
					}
				}
				if len(a.Blocks) == 0 {
					a.Blocks = nil
				}
				want, encoded = a, AppendAck(nil, a)
				got, err = DecodeAtConsumer(m.Hex)
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("decoded (-want +got):\n%s", d)
			}
			if d := cmp.Diff(hex.EncodeToString(m.Hex), hex.EncodeToString(encoded)); d != "" {
				t.Errorf("encoded (-want +got):\n%s", d)
			}
		})
	}
}

func TestGenerationIsLeftOutAndFilledInByTheReceiver(t *testing.T) {
	for _, c := range []struct{ version, sender, receiver, want int }{
		{1, 1, 1, 1}, {2, 2, 2, 2}, {1, 1, 2, 2}, {2, 2, 1, 1}, // left out: the receiver cannot tell
		{1, 2, 2, 1}, {2, 1, 2, 2}, {2, 1, 1, 2}, {7, 2, 2, 7}, {-1, 2, 2, -1}, // explicit
		{0, 2, 1, 1}, // the sender's own
	} {
		b := AppendRequest(nil, &Request{Key: "k", CompatHash: "c", Version: c.version}, c.sender)
		m, err := DecodeAtProducer(b, c.receiver)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.(*Request).Version; got != c.want {
			t.Errorf("version %d from generation %d, read by generation %d: %d, want %d", c.version, c.sender, c.receiver, got, c.want)
		}
	}
}

func TestCapturedConnectionDecodesAndEncodesToTheSameBytes(t *testing.T) {
	g := readGolden(t)
	var requests, acks int
	for _, c := range g.Capture {
		for _, b := range c.ToProducer.payloads() {
			m, err := DecodeAtProducer(b, Generation2)
			if err != nil {
				t.Fatal(err)
			}
			if got := pythonRequest(m.(*Request)); got != g.Decoded.Reqs[requests] {
				t.Errorf("got %s, want %s", got, g.Decoded.Reqs[requests])
			}
			if d := cmp.Diff(b, AppendRequest(nil, m.(*Request), Generation2)); d != "" {
				t.Error(d)
			}
			requests++
		}
		for _, b := range c.ToConsumer.payloads() {
			m, err := DecodeAtConsumer(b)
			if err != nil {
				t.Fatal(err)
			}
			w, a := g.Decoded.Acks[acks], m.(*Ack)
			want := &Ack{Key: w.Key, Status: w.Status, Session: w.Session, Blocks: w.Blocks, AgentMetadata: w.Agent, MemDescriptor: a.MemDescriptor}
			if d := cmp.Diff(want, a); d != "" {
				t.Error(d)
			}
			d, err := DecodeMemDescriptor(a.MemDescriptor, len(w.Mem))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(descriptors(w.Mem), d); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff(b, AppendAck(nil, a)); d != "" {
				t.Error(d)
			}
			acks++
		}
	}
	if requests != len(g.Decoded.Reqs) || acks != len(g.Decoded.Acks) || acks == 0 {
		t.Errorf("%d requests and %d acks in the capture", requests, acks)
	}
}

func TestStatusHasThePeersNamesAndOnlyNotReadyIsRetryable(t *testing.T) {
	g := readGolden(t)
	for name, s := range g.StatusCodes {
		if s.String() != name {
			t.Errorf("%d is %s, want %s", s, s, name)
		}
		if s.Retryable() != (name == g.Retryable[0]) {
			t.Errorf("%s: retryable %v", name, s.Retryable())
		}
	}
	if got := Status(9).String(); got != "Status(9)" {
		t.Error(got)
	}
}

func descriptors(v [][3]uint64) []Descriptor {
	d := make([]Descriptor, len(v))
	for i, x := range v {
		d[i] = Descriptor{x[0], x[1], uint32(x[2])}
	}
	return d
}

func TestAHeadAndADescriptorAreAWholeAck(t *testing.T) {
	for _, size := range []int{1, 300, 70_000} {
		a := fullAck()
		a.Ferry = nil
		a.MemDescriptor = nil
		head := AppendAckHead([]byte("before"), a, size)
		a.MemDescriptor = bytes.Repeat([]byte{7}, size)
		if whole := AppendAck([]byte("before"), a); !bytes.Equal(append(head, a.MemDescriptor...), whole) {
			t.Errorf("%d bytes: differs from AppendAck", size)
		}
	}
}
