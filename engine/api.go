package engine

import (
	"encoding/json"

	"github.com/tensorferry/tensorferry/ec"
)

// chatRequest is what the engine reads of an OpenAI chat completion; other fields are ignored.
type chatRequest struct {
	Model     string          `json:"model"`
	Messages  []message       `json:"messages"`
	Stream    bool            `json:"stream"`
	Params    json.RawMessage `json:"ec_transfer_params"`
	ExtraArgs struct {
		Params json.RawMessage `json:"ec_transfer_params"`
	} `json:"extra_args"`
	Check bool `json:"ferry_check"`
}

type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"` // a string, or a list of parts
}

// part is one content item.
type part struct {
	Type        string          `json:"type"`
	Text        string          `json:"text"`
	ImageURL    json.RawMessage `json:"image_url"`    // {"url": ..} or a string
	ImageEmbeds json.RawMessage `json:"image_embeds"` // metadata: {"image_grid_thw": ..}
	UUID        string          `json:"uuid"`
}

// Answer is the engine's chat completion.
type Answer struct {
	ID      string     `json:"id"`
	Object  string     `json:"object"`
	Created int64      `json:"created"`
	Model   string     `json:"model"`
	Choices []Choice   `json:"choices"`
	Usage   *Usage     `json:"usage,omitempty"`
	Params  *ec.Params `json:"ec_transfer_params,omitempty"`
	Ferry   *Report    `json:"ferry,omitempty"`
}

// Choice is one of OpenAI's choices; there is only ever one.
type Choice struct {
	Index        int      `json:"index"`
	Message      *Message `json:"message,omitempty"`
	Delta        *Message `json:"delta,omitempty"`
	FinishReason *string  `json:"finish_reason"`
}

// Message is an assistant's text.
type Message struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

// Usage counts a row of an encoding, and a word of text, as a token.
type Usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
}

// Report is the `ferry` object of an answer: what was embedded and where it came from.
type Report struct {
	Engine  string     `json:"engine"`
	Role    Role       `json:"role"`
	Weights string     `json:"weights"` // "dummy"
	Node    string     `json:"node"`
	Encodes uint64     `json:"encodes"` // images that this engine has encoded since its start
	Items   []Embedded `json:"items"`
}

// Where an encoding came from.
const (
	SourceEncoded = "encoded" // by this engine, for this item
	SourcePool    = "pool"    // it was in the node's pool: no byte moved
	SourcePulled  = "pulled"  // the node read it from a peer for this request
)

// Embedded says what stands for one media item.
type Embedded struct {
	Item    string  `json:"item"` // messages[0].content[1]
	Key     string  `json:"key"`
	Shape   []int64 `json:"shape"`
	Dtype   string  `json:"dtype"`
	Bytes   int64   `json:"bytes"`
	Digest  string  `json:"sha256"` // of the encoding's bytes, as mapped
	Source  string  `json:"source"`
	Plane   string  `json:"plane,omitempty"`   // of the pull; "local": found in the pool
	MS      float64 `json:"ms"`                // of the encode or the pull
	Pooled  bool    `json:"pooled"`            // false: only in this engine's memory, so it is not announced
	Note    string  `json:"note,omitempty"`    // why it is not pooled, or what failed on the way
	Checked *bool   `json:"checked,omitempty"` // with ferry_check: equal to a second, independent encode, byte for byte
}
