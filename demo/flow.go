package demo

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/engine"
)

// engineClient talks to one engine.
type engineClient struct {
	url  string
	http *http.Client
}

func newEngineClient(url string) *engineClient {
	return &engineClient{url: url, http: &http.Client{Timeout: requestTimeout}}
}

// engineError is an engine's answer that is an error.
type engineError struct {
	Status  int
	Message string
}

func (e *engineError) Error() string { return fmt.Sprintf("HTTP %d: %s", e.Status, e.Message) }

// The bodies are those that vLLM's own example proxy for encode and decode sends.
type (
	chatRequest struct {
		Model    string     `json:"model"`
		Messages []chatTurn `json:"messages"`
		Stream   bool       `json:"stream"`
		Params   *ec.Params `json:"ec_transfer_params,omitempty"`
		Check    bool       `json:"ferry_check,omitempty"`
	}
	chatTurn struct {
		Role    string     `json:"role"`
		Content []chatItem `json:"content"`
	}
	chatItem struct {
		Type        string          `json:"type"`
		Text        string          `json:"text,omitempty"`
		ImageURL    *imageURL       `json:"image_url,omitempty"`
		ImageEmbeds json.RawMessage `json:"image_embeds,omitempty"`
		UUID        string          `json:"uuid,omitempty"`
	}
	imageURL struct {
		URL string `json:"url"`
	}
)

func (c *engineClient) chat(ctx context.Context, id string, r *chatRequest) (*engine.Answer, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		var e struct {
			Error struct {
				Message string `json:"message"`
			} `json:"error"`
		}
		if json.Unmarshal(b, &e) != nil || e.Error.Message == "" {
			e.Error.Message = strings.TrimSpace(string(b))
		}
		return nil, &engineError{resp.StatusCode, e.Error.Message}
	}
	a := new(engine.Answer)
	if err := json.Unmarshal(b, a); err != nil {
		return nil, err
	}
	if a.Ferry == nil || len(a.Ferry.Items) != 1 {
		return nil, errors.New("the answer does not say what was embedded")
	}
	return a, nil
}

// image takes one picture through the flow. An error ends the demo; what is wrong with the picture, or with a check, is in the
// line. seen has the keys of pictures that came before.
func (c *cluster) image(ctx context.Context, p picture, seen map[string]bool) (Image, error) {
	line := Image{Name: p.name, Width: p.width, Height: p.height, Skipped: p.broken}
	if p.broken != "" {
		return line, nil
	}
	url := "data:" + http.DetectContentType(p.data) + ";base64," + base64.StdEncoding.EncodeToString(p.data)
	sum := sha256.Sum256([]byte(url))
	key := hex.EncodeToString(sum[:])
	id := "demo-" + key[:12]
	twin := seen[key] // the same picture under another name: it is in the pool, and that is right
	seen[key] = true

	toEncode := &chatRequest{Model: model, Messages: []chatTurn{{"user", []chatItem{
		{Type: "image_url", ImageURL: &imageURL{url}, UUID: key},
	}}}}
	encoded, err := c.encode.chat(ctx, id+":0:encode", toEncode)
	if bad := (*engineError)(nil); errors.As(err, &bad) && bad.Status == http.StatusBadRequest {
		line.Skipped = bad.Message
		return line, nil
	}
	if err != nil {
		return line, fmt.Errorf("engine E: %w", err)
	}
	e := encoded.Ferry.Items[0]
	line.Key, line.Shape, line.Bytes, line.EncodeMS, line.Digest = e.Key, e.Shape, e.Bytes, e.MS, e.Digest
	line.expect("encoded once", e.Source == engine.SourceEncoded && !twin || e.Source == engine.SourcePool && twin,
		"engine E took it from: %s", e.Source)
	var offer *ec.Announcement
	if encoded.Params != nil {
		offer, _ = encoded.Params.Get(key)
	}
	if offer == nil || !offer.Servable() {
		line.expect("announced", false, "engine E announced no address (%s)", e.Note)
		return line, nil
	}

	// What the orchestrator sends on: the metadata in place of the media. The original rides along for the check alone.
	embeds := chatItem{Type: "image_embeds", ImageEmbeds: offer.Metadata, UUID: key}
	checked := embeds
	checked.ImageURL = &imageURL{url}
	question := chatItem{Type: "text", Text: "What is in this image?"}
	decode := func(item chatItem, check bool) *chatRequest {
		return &chatRequest{Model: model, Messages: []chatTurn{{"user", []chatItem{question, item}}}, Params: encoded.Params, Check: check}
	}

	answer, err := c.decode.chat(ctx, id+":0:decode", decode(checked, true))
	if err != nil {
		return line, line.failed("engine D", err)
	}
	d := answer.Ferry.Items[0]
	line.PullMS, line.Plane, line.Checked = d.MS, d.Plane, d.Checked != nil && *d.Checked
	line.expect("pulled", d.Source == engine.SourcePulled && !twin || d.Source == engine.SourcePool && twin, "engine D took it from: %s", d.Source)
	line.expect("byte for byte", line.Checked && d.Digest == e.Digest, "sha256 %s at E, %s at D", e.Digest, d.Digest)
	line.expect("engine D encodes nothing", answer.Ferry.Encodes == 0, "%d encodes", answer.Ferry.Encodes)

	again, err := c.encode.chat(ctx, id+":1:encode", toEncode)
	if err != nil {
		return line, line.failed("engine E, second request", err)
	}
	answer, err = c.decode.chat(ctx, id+":1:decode", decode(embeds, false))
	if err != nil {
		return line, line.failed("engine D, second request", err)
	}
	a, b := again.Ferry.Items[0], answer.Ferry.Items[0]
	line.Second = a.Source
	line.expect("second request encodes nothing",
		a.Source == engine.SourcePool && again.Ferry.Encodes == encoded.Ferry.Encodes && b.Source == engine.SourcePool && answer.Ferry.Encodes == 0,
		"engine E: %s, engine D: %s", a.Source, b.Source)
	line.expect("second request, same bytes", a.Digest == e.Digest && b.Digest == e.Digest, "sha256 %s and %s", a.Digest, b.Digest)

	answer, err = c.third.chat(ctx, id+":2:decode", decode(embeds, false))
	if err != nil {
		return line, line.failed("engine X", err)
	}
	x := answer.Ferry.Items[0]
	line.Third = x.Source
	line.expect("third engine reads it in place", x.Source == engine.SourcePool && answer.Ferry.Encodes == 0, "engine X took it from: %s", x.Source)
	line.expect("third engine, same bytes", x.Digest == e.Digest, "sha256 %s at E, %s at X", e.Digest, x.Digest)
	return line, nil
}

// expect notes a check that does not hold.
func (i *Image) expect(what string, ok bool, format string, args ...any) {
	if !ok {
		i.Failures = append(i.Failures, what+": "+fmt.Sprintf(format, args...))
	}
}

// failed notes an engine's refusal as a failed check. Anything else, such as an engine that has gone, ends the demo.
func (i *Image) failed(who string, err error) error {
	if e := (*engineError)(nil); errors.As(err, &e) {
		i.Failures = append(i.Failures, who+": "+e.Error())
		return nil
	}
	return fmt.Errorf("%s: %w", who, err)
}

// rate is bytes a second of a pull that moved bytes.
func (i *Image) rate() float64 {
	if i.PullMS <= 0 {
		return 0
	}
	return float64(i.Bytes) / (i.PullMS * float64(time.Millisecond) / float64(time.Second))
}
