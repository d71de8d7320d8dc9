package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Handler serves POST /v1/chat/completions, GET /v1/models and GET /health.
func (e *Engine) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", e.chat)
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("GET /health", e.health)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, &Error{http.StatusNotFound, "NotFoundError", "", fmt.Sprintf(
			"no %s %s here; this engine serves POST /v1/chat/completions, GET /v1/models and GET /health", r.Method, clip(r.URL.Path))})
	})
	return mux
}

func (e *Engine) health(w http.ResponseWriter, _ *http.Request) {
	if e.away.Load() {
		writeError(w, unavailable("the node's connection is lost"))
		return
	}
	writeJSON(w, http.StatusOK, struct {
		Status string `json:"status"`
	}{"ok"})
}

func (e *Engine) models(w http.ResponseWriter, _ *http.Request) {
	type model struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		OwnedBy string `json:"owned_by"`
	}
	writeJSON(w, http.StatusOK, struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{"list", []model{{e.cfg.Model, "model", "tensorferry reference engine (dummy weights)"}}})
}

func (e *Engine) chat(w http.ResponseWriter, hr *http.Request) {
	start := time.Now()
	c, r, err := e.process(w, hr)
	id := clip(hr.Header.Get("X-Request-Id"))
	if err != nil {
		e.cfg.Log.Info("request failed", "request", id, "status", err.Status, "err", err, "took", time.Since(start))
		writeError(w, err)
		return
	}
	e.cfg.Log.Debug("request", "request", id, "items", len(r.report.Items), "encodes", r.report.Encodes, "took", time.Since(start))
	if id == "" {
		id = fmt.Sprintf("%x", start.UnixNano())
	}
	rows := 0
	for _, it := range r.items {
		rows += it.grid.Rows()
	}
	text := e.text(r)
	words := len(strings.Fields(text))
	a := Answer{
		ID: "chatcmpl-" + id, Object: "chat.completion", Created: start.Unix(), Model: e.cfg.Model,
		Usage:  &Usage{rows + r.words, words, rows + r.words + words},
		Params: r.params, Ferry: &r.report,
	}
	stop := "stop"
	if !c.Stream {
		a.Choices = []Choice{{Message: &Message{"assistant", text}, FinishReason: &stop}}
		writeJSON(w, http.StatusOK, a)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	chunk := Answer{ID: a.ID, Object: "chat.completion.chunk", Created: a.Created, Model: a.Model}
	chunk.Choices = []Choice{{Delta: &Message{"assistant", text}}}
	a.Object, a.Choices = chunk.Object, []Choice{{Delta: &Message{}, FinishReason: &stop}}
	for _, x := range []Answer{chunk, a} {
		b, err := json.Marshal(x)
		if err != nil {
			e.cfg.Log.Error("answer", "err", err)
			return
		}
		fmt.Fprintf(w, "data: %s\n\n", b)
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

// process takes one request through the step loop.
func (e *Engine) process(w http.ResponseWriter, hr *http.Request) (*chatRequest, *request, *Error) {
	ctx := hr.Context()
	if hr.ContentLength > e.cfg.MaxBodyBytes {
		return nil, nil, tooLarge("the body is %d bytes; at most %d are taken", hr.ContentLength, e.cfg.MaxBodyBytes)
	}
	// Bodies and decoded images are only held by requests that are let in.
	if err := e.admitted.Acquire(ctx, 1); err != nil {
		return nil, nil, unavailable("%v", err)
	}
	defer e.admitted.Release(1)
	body, err := io.ReadAll(http.MaxBytesReader(w, hr.Body, e.cfg.MaxBodyBytes))
	if err != nil {
		if big := new(http.MaxBytesError); errors.As(err, &big) {
			return nil, nil, tooLarge("the body is more than %d bytes", big.Limit)
		}
		return nil, nil, badRequest("", "reading the body: %v", err)
	}
	if e.away.Load() {
		return nil, nil, unavailable("the node's connection is lost")
	}
	c, r, perr := e.parse(ctx, body)
	if perr != nil {
		return nil, nil, perr
	}
	e.inbox.put(func(b *mail) { b.arrived = append(b.arrived, r) })
	select {
	case <-r.done:
	case <-ctx.Done():
		e.inbox.put(func(*mail) {}) // a step drops it
		return nil, nil, unavailable("%v", ctx.Err())
	case <-e.ctx.Done():
		return nil, nil, unavailable("the engine is shutting down")
	}
	return c, r, r.err
}

// text is the whole of what this engine has to say. A producer says nothing, as vLLM's encode-only instances do.
func (e *Engine) text(r *request) string {
	if e.cfg.Role == Producer {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Reference engine with dummy weights; no text is generated. Encodings mapped: %d.", len(r.report.Items))
	for _, it := range r.report.Items {
		fmt.Fprintf(&b, "\n%s: %s, %v of %s, sha256 %s, %s", it.Item, it.Key, it.Shape, it.Dtype, it.Digest, it.Source)
		if it.Plane != "" {
			fmt.Fprintf(&b, " (%s)", it.Plane)
		}
	}
	return b.String()
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(append(b, '\n'))
}

func writeError(w http.ResponseWriter, e *Error) {
	if e.Status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	writeJSON(w, e.Status, e.body())
}
