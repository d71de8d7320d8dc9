package engine

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

const testWidth = 8

type rig struct {
	t    *testing.T
	pool *fakePool
	eng  *Engine
	url  string
}

func newRig(t *testing.T, c Config) *rig {
	t.Helper()
	p := newFakePool(testWidth)
	return rigOn(t, p, c)
}

func rigOn(t *testing.T, p *fakePool, c Config) *rig {
	t.Helper()
	if c.Dial == nil {
		c.Dial = p.dial
	}
	if c.Role == "" {
		c.Role = Both
	}
	e, err := New(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(e.Handler())
	t.Cleanup(func() {
		s.Close()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if n := p.pinned(); n != 0 {
			t.Errorf("%d pins left", n)
		}
	})
	return &rig{t, p, e, s.URL}
}

type answer struct {
	Answer
	Status int
	Error  errorFields `json:"error"`
	Raw    string
}

func (r *rig) post(body string) answer { return r.postCtx(r.t.Context(), body) }

func (r *rig) postCtx(ctx context.Context, body string) answer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", r.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{Raw: err.Error()}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Error(err)
	}
	a := answer{Status: resp.StatusCode, Raw: string(b)}
	if resp.Header.Get("Content-Type") == "application/json" {
		if err := json.Unmarshal(b, &a); err != nil {
			r.t.Errorf("%s: %v", b, err)
		}
	}
	return a
}

func (r *rig) ok(body string) answer {
	r.t.Helper()
	a := r.post(body)
	if a.Status != 200 {
		r.t.Fatalf("status %d: %s", a.Status, a.Raw)
	}
	return a
}

func dataURL(b []byte) string {
	return "data:image/png;base64," + base64.StdEncoding.EncodeToString(b)
}

func chat(extra string, items ...string) string {
	return fmt.Sprintf(`{"model":"tiny-mm","messages":[{"role":"user","content":[%s]}]%s}`, strings.Join(items, ","), extra)
}

func imageURL(b []byte, uuid string) string {
	s := fmt.Sprintf(`{"type":"image_url","image_url":{"url":%q}`, dataURL(b))
	if uuid != "" {
		s += fmt.Sprintf(`,"uuid":%q`, uuid)
	}
	return s + "}"
}

func embeds(grid, uuid string) string {
	return fmt.Sprintf(`{"type":"image_embeds","image_embeds":{"image_grid_thw":%s},"uuid":%q}`, grid, uuid)
}

func offer(key string, rows, width int) string {
	return fmt.Sprintf(`,"ec_transfer_params":{%q:{"item_indices":[0],"metadata":{},"peer_host":"10.0.0.2","peer_port":5601,"size_bytes":%d,"shape":[%d,%d]}}`,
		key, rows*testWidth*2, rows, width)
}

// pulls answers a fetch of the engine by putting what data gives into the pool.
func (p *fakePool) pulls(plane string, data map[string][]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.onFetch = func(_ context.Context, params ec.Params) (<-chan client.FetchResult, error) {
		out := make(chan client.FetchResult, params.Len())
		for _, k := range params.Keys() {
			b, ok := data[k]
			if !ok {
				out <- client.FetchResult{Key: k, Outcome: ec.FetchMissing, Reason: "the peer does not have it"}
				continue
			}
			a, _ := params.Get(k)
			p.put(k, ec.Spec{Dtype: Dtype, Shape: []int64{int64(a.Shape[0]), int64(a.Shape[1])}, Bytes: int64(len(b))}, b)
			out <- client.FetchResult{Key: k, Outcome: ec.FetchReady, Bytes: int64(len(b)), Plane: plane, Elapsed: time.Millisecond}
		}
		close(out)
		return out, nil
	}
}

func TestProducerEncodesAnnouncesAndSaysNothing(t *testing.T) {
	r := newRig(t, Config{Role: Producer})
	img := pngBytes(t, picture(84, 56, 1))
	a := r.ok(chat("", `{"type":"text","text":"look at"}`, imageURL(img, "k1"), imageURL(pngBytes(t, picture(56, 56, 2)), "k2"), imageURL(img, "k1")))
	if got := a.Choices[0].Message.Content; got != "" {
		t.Errorf("text %q", got)
	}
	if a.Ferry.Encodes != 2 || len(a.Ferry.Items) != 3 || a.Ferry.Items[0].Source != SourceEncoded {
		t.Errorf("report %+v", a.Ferry)
	}
	if a.Params == nil || a.Params.Len() != 2 {
		t.Fatalf("params %+v", a.Params)
	}
	k1, _ := a.Params.Get("k1")
	if string(k1.Metadata) != `{"image_grid_thw":[[1,4,6]]}` || !k1.Servable() || fmt.Sprint(k1.ItemIndices, k1.Shape) != "[0 2] [6 8]" {
		t.Errorf("announcement of k1: %+v %s", k1, k1.Metadata)
	}
	if k2, _ := a.Params.Get("k2"); fmt.Sprint(k2.ItemIndices) != "[1]" {
		t.Errorf("announcement of k2: %+v", k2)
	}
	if a.Usage.PromptTokens != 6+4+6+2 {
		t.Errorf("prompt tokens %d", a.Usage.PromptTokens)
	}
}

func TestSecondRequestForAnImageEncodesNothing(t *testing.T) {
	r := newRig(t, Config{})
	body := chat(`,"ferry_check":true`, imageURL(jpegBytes(t, picture(90, 70, 1)), ""))
	one, two := r.ok(body), r.ok(body)
	i, j := one.Ferry.Items[0], two.Ferry.Items[0]
	if i.Source != SourceEncoded || j.Source != SourcePool || two.Ferry.Encodes != 1 {
		t.Errorf("sources %s, %s; %d encodes", i.Source, j.Source, two.Ferry.Encodes)
	}
	if i.Key != j.Key || len(i.Key) != 64 || i.Digest != j.Digest {
		t.Errorf("keys %s, %s; digests %s, %s", i.Key, j.Key, i.Digest, j.Digest)
	}
	if i.Checked == nil || !*i.Checked || j.Checked == nil || !*j.Checked {
		t.Error("the check did not hold")
	}
}

func TestTheCheckFindsASingleWrongByte(t *testing.T) {
	r := newRig(t, Config{})
	img := pngBytes(t, picture(56, 56, 1))
	bad := embedded(t, r.eng.encoder, decoded(t, img))
	bad[len(bad)-1] ^= 1
	r.pool.put("k", r.eng.spec(Grid{1, 4, 4}), bad)
	a := r.ok(chat(`,"ferry_check":true`, imageURL(img, "k")))
	if c := a.Ferry.Items[0].Checked; c == nil || *c {
		t.Errorf("checked %v", c)
	}
}

func TestManyRequestsForOneImageEncodeItOnce(t *testing.T) {
	r := newRig(t, Config{Step: time.Millisecond})
	body := chat("", imageURL(pngBytes(t, picture(84, 84, 5)), ""))
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() { r.ok(body) })
	}
	wg.Wait()
	if n := r.eng.encodes.Load(); n != 1 {
		t.Errorf("%d encodes", n)
	}
}

// reserved is "k", an image of 4 rows, being filled by another engine.
func reserved(t *testing.T, p *fakePool) Reservation {
	t.Helper()
	r, err := p.Reserve(t.Context(), ReserveItem{"k", ec.Spec{Dtype: Dtype, Shape: []int64{4, testWidth}, Bytes: 4 * 2 * testWidth}})
	if err != nil || r[0].Err != nil {
		t.Fatal(err, r[0].Err)
	}
	return r[0].Reservation
}

func TestEncodeOfAnotherEngineIsWaitedFor(t *testing.T) {
	p := newFakePool(testWidth)
	img := pngBytes(t, picture(56, 56, 1))
	res := reserved(t, p)
	r := rigOn(t, p, Config{})
	got := make(chan answer, 1)
	go func() { got <- r.post(chat("", imageURL(img, "k"))) }()
	other := r.ok(chat("", imageURL(pngBytes(t, picture(84, 84, 2)), ""))) // the loop goes on meanwhile
	if other.Ferry.Items[0].Source != SourceEncoded {
		t.Errorf("report %+v", other.Ferry)
	}
	if err := r.eng.encoder.embed(decoded(t, img), res.Buffers()); err != nil {
		t.Fatal(err)
	}
	m, err := p.Commit(t.Context(), res)
	if err != nil {
		t.Fatal(err)
	}
	m[0].Mapped.Release()
	if a := <-got; a.Status != 200 || a.Ferry.Items[0].Source != SourcePool {
		t.Errorf("%s", a.Raw)
	}
}

func TestStepCallsTheNodeAFewTimesHoweverManyRequestsItHas(t *testing.T) {
	p := newFakePool(testWidth)
	e, err := prepare(t.Context(), Config{Role: Both, Dial: p.dial})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	var batch []*request
	for i := range 10 {
		_, r, perr := e.parse(t.Context(), []byte(chat("", imageURL(pngBytes(t, picture(56, 56, i)), ""), imageURL(pngBytes(t, picture(56, 84, i)), ""))))
		if perr != nil {
			t.Fatal(perr)
		}
		batch = append(batch, r)
	}
	e.step(mail{arrived: batch})
	for _, r := range batch {
		<-r.done
		if r.err != nil || r.params.Len() != 2 {
			t.Fatal(r.err, r.params)
		}
	}
	for _, call := range []string{"map", "reserve", "commit", "announce"} {
		if n := p.count(call); n != 1 {
			t.Errorf("%d calls of %s, want 1", n, call)
		}
	}
}

func TestEngineTakesOverWhenTheOtherEngineDies(t *testing.T) {
	p := newFakePool(testWidth)
	res := reserved(t, p)
	r := rigOn(t, p, Config{})
	got := make(chan answer, 1)
	go func() { got <- r.post(chat("", imageURL(pngBytes(t, picture(56, 56, 1)), "k"))) }()
	until(t, func() bool { return p.count("wait") > 0 })
	if err := res.Discard(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := <-got; a.Status != 200 || a.Ferry.Items[0].Source != SourceEncoded {
		t.Errorf("%s", a.Raw)
	}
}

func TestRewrittenItemIsPulledAndChecked(t *testing.T) {
	r := newRig(t, Config{Role: Consumer})
	img := pngBytes(t, picture(84, 56, 1))
	want := embedded(t, r.eng.encoder, decoded(t, img))
	r.pool.pulls("tcp", map[string][]byte{"k": want})
	item := strings.TrimSuffix(embeds("[[1,4,6]]", "k"), "}") + fmt.Sprintf(`,"image_url":{"url":%q}}`, dataURL(img))
	a := r.ok(chat(`,"ferry_check":true`+offer("k", 6, testWidth), item))
	it := a.Ferry.Items[0]
	if it.Source != SourcePulled || it.Plane != "tcp" || it.Checked == nil || !*it.Checked || a.Ferry.Encodes != 0 {
		t.Errorf("%s", a.Raw)
	}
	if a.Params != nil {
		t.Error("a consumer announced")
	}
	if b := r.ok(chat(offer("k", 6, testWidth), embeds("[1,4,6]", "k"))); b.Ferry.Items[0].Source != SourcePool || r.pool.count("fetch") != 1 {
		t.Errorf("second request: %s", b.Raw)
	}
}

// C1: one missed encoding fails its request and nothing else.
func TestLostEncodingFailsItsRequestAndNotTheEngine(t *testing.T) {
	r := newRig(t, Config{Role: Consumer})
	r.pool.pulls("tcp", nil)
	for _, c := range []struct{ name, body, want string }{
		{"peer lost it", chat(offer("k", 6, testWidth), embeds("[[1,4,6]]", "k")), "missing: the peer does not have it"},
		{"no address", chat("", embeds("[[1,4,6]]", "k")), "no address"},
		{"announced without an address", chat(`,"ec_transfer_params":{"k":{"metadata":{}}}`, embeds("[[1,4,6]]", "k")), "no address"},
	} {
		a := r.post(c.body)
		if a.Status != 500 || a.Error.Type != "EncodingLostError" || a.Error.Code != 500 || !strings.Contains(a.Error.Message, c.want) ||
			a.Error.Param == nil || *a.Error.Param != "messages[0].content[0]" {
			t.Errorf("%s: %d %s", c.name, a.Status, a.Raw)
		}
	}
	if a := r.ok(chat("", imageURL(pngBytes(t, picture(56, 56, 1)), ""))); a.Ferry.Items[0].Source != SourceEncoded {
		t.Errorf("the next request: %s", a.Raw)
	}
}

func TestMediaOnTheRequestStandsInForALostEncoding(t *testing.T) {
	r := newRig(t, Config{Role: Consumer})
	r.pool.pulls("tcp", nil)
	a := r.ok(chat(offer("k", 4, testWidth), imageURL(pngBytes(t, picture(56, 56, 1)), "k")))
	if it := a.Ferry.Items[0]; it.Source != SourceEncoded || !strings.Contains(it.Note, "missing") {
		t.Errorf("%s", a.Raw)
	}
}

func TestAnnouncementOfAnotherSizeIsNeverAskedFor(t *testing.T) {
	r := newRig(t, Config{Role: Consumer})
	size := func(n int) string {
		return fmt.Sprintf(`,"ec_transfer_params":{"k":{"metadata":{},"peer_host":"10.0.0.2","peer_port":5601,"size_bytes":%d}}`, n)
	}
	for _, c := range []struct{ params, want string }{
		{offer("k", 5, testWidth), "shape is [5 8], the image has 6 rows of width 8"},
		{offer("k", 6, testWidth+1), "shape is [6 9]"},
		{size(95), "says 95 bytes, the image has 96"},
		{strings.Replace(offer("k", 6, testWidth), "5601", "70000", 1), "70000"},
		{strings.Replace(offer("k", 6, testWidth), `"10.0.0.2"`, "7", 1), "peer_host"},
	} {
		if a := r.post(chat(c.params, embeds("[[1,4,6]]", "k"))); a.Status != 500 || !strings.Contains(a.Error.Message, c.want) {
			t.Errorf("%s: %d %s", c.params, a.Status, a.Raw)
		}
	}
	if n := r.pool.count("fetch") + r.pool.count("reserve"); n != 0 {
		t.Errorf("%d calls were made for them", n)
	}
}

func TestEntryOfAnotherShapeIsNeverServed(t *testing.T) {
	r := newRig(t, Config{})
	r.pool.put("k", r.eng.spec(Grid{1, 4, 4}), make([]byte, 4*2*testWidth))
	if a := r.post(chat("", embeds("[[1,4,6]]", "k"))); a.Status != 400 || !strings.Contains(a.Error.Message, "[4 8]") {
		t.Errorf("%d %s", a.Status, a.Raw)
	}
	a := r.ok(chat("", imageURL(pngBytes(t, picture(84, 56, 1)), "k")))
	if it := a.Ferry.Items[0]; it.Pooled || it.Source != SourceEncoded || it.Shape[0] != 6 {
		t.Errorf("%s", a.Raw)
	}
	if k, ok := a.Params.Get("k"); !ok || k.Servable() || string(k.Metadata) != "{}" {
		t.Errorf("announced %+v", k)
	}
}

func TestFullPoolIsServedFromPrivateMemoryAndAnnouncedWithoutAnAddress(t *testing.T) {
	r := newRig(t, Config{Role: Producer})
	r.pool.full = true
	a := r.ok(chat(`,"ferry_check":true`, imageURL(pngBytes(t, picture(84, 56, 1)), "k")))
	it := a.Ferry.Items[0]
	if it.Pooled || it.Source != SourceEncoded || !strings.Contains(it.Note, "full") || !*it.Checked {
		t.Errorf("%s", a.Raw)
	}
	if k, ok := a.Params.Get("k"); !ok || k.Servable() {
		t.Errorf("announced %+v", k)
	}
}

func TestPullGoesOnForWhoIsLeftAndEndsWithTheLast(t *testing.T) {
	p := newFakePool(testWidth)
	ended := make(chan struct{})
	p.onFetch = func(ctx context.Context, _ ec.Params) (<-chan client.FetchResult, error) {
		out := make(chan client.FetchResult)
		go func() {
			<-ctx.Done()
			close(ended)
			close(out)
		}()
		return out, nil
	}
	e, err := prepare(t.Context(), Config{Role: Consumer, Dial: p.dial})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	body := chat(offer("k", 6, testWidth), embeds("[[1,4,6]]", "k"))
	arrive := func() (context.CancelFunc, *request) {
		ctx, cancel := context.WithCancel(t.Context())
		_, r, perr := e.parse(ctx, []byte(body))
		if perr != nil {
			t.Fatal(perr)
		}
		e.step(mail{arrived: []*request{r}})
		return cancel, r
	}
	cancelOne, one := arrive()
	cancelTwo, two := arrive()
	if n := len(e.flights["k"].items); n != 2 {
		t.Fatalf("%d items wait for the pull, want 2", n)
	}
	cancelOne()
	e.step(mail{})
	<-one.done
	select {
	case <-ended:
		t.Fatal("the pull was canceled under the second request")
	default:
	}
	cancelTwo()
	e.step(mail{})
	<-two.done
	<-ended
	if n := p.count("fetch"); n != 1 {
		t.Errorf("%d pulls", n)
	}

	// A request that comes before the canceled pull has landed does not take its end for an answer.
	_, three := arrive()
	if three.items[0].state != wanted {
		t.Errorf("state %d", three.items[0].state)
	}
	data := make([]byte, 6*2*testWidth)
	p.pulls("tcp", map[string][]byte{"k": data})
	until(t, func() bool {
		e.step(e.inbox.take(1))
		return three.items[0].state == served
	})
	if three.items[0].out.Source != SourcePulled {
		t.Errorf("%+v", three.items[0].out)
	}
}

func TestLostNodeFailsRequestsUntilItIsBack(t *testing.T) {
	first, second := newFakePool(testWidth), newFakePool(testWidth)
	pools := make(chan *fakePool, 2)
	pools <- first
	dial := func(ctx context.Context) (Pool, error) {
		select {
		case p := <-pools:
			return p, nil
		case <-time.After(time.Millisecond):
			return nil, errors.New("nobody listens")
		}
	}
	r := rigOn(t, first, Config{Dial: dial})
	body := chat("", imageURL(pngBytes(t, picture(56, 56, 1)), "k"))
	r.ok(body)
	close(first.lost)
	until(t, func() bool { return r.post(body).Status == 503 })
	pools <- second
	until(t, func() bool { return r.post(body).Status == 200 })
	if second.count("reserve") == 0 {
		t.Error("the new connection was not used")
	}
}

func TestPoolThatDoesNotFitIsRefusedAtStart(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*fakePool)
		cfg    Config
		want   string
	}{
		{"dtype", func(p *fakePool) { p.info.Dtype = "torch.float16" }, Config{Role: Both}, "torch.float16"},
		{"block", func(p *fakePool) { p.info.BlockBytes = 7 }, Config{Role: Both}, "7 bytes"},
		{"model", func(p *fakePool) {}, Config{Role: Both, Model: "other"}, `"other" on a pool for "tiny-mm"`},
		{"role", func(p *fakePool) {}, Config{Role: "both"}, "want ec_producer"},
		{"files", func(p *fakePool) {}, Config{Role: Both, AllowFiles: "/no/such/directory"}, "allowed directory"},
	} {
		p := newFakePool(testWidth)
		c.change(p)
		c.cfg.Dial = p.dial
		if _, err := New(t.Context(), c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestHealthAndModels(t *testing.T) {
	r := newRig(t, Config{})
	for path, want := range map[string]string{"/health": `"ok"`, "/v1/models": `"tiny-mm"`, "/v1/other": "NotFoundError"} {
		resp, err := http.Get(r.url + path)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if !bytes.Contains(b, []byte(want)) {
			t.Errorf("%s: %s", path, b)
		}
	}
}

// until polls with a deadline.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("waited 20 s in vain")
		}
	}
}
