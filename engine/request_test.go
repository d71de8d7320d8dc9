package engine

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBadRequestsNameTheItemAndLeaveTheEngineRunning(t *testing.T) {
	r := newRig(t, Config{MaxItems: 2, MaxImagePixels: 1 << 20, MaxBodyBytes: 1 << 16})
	good := imageURL(pngBytes(t, picture(56, 56, 1)), "")
	png1 := pngBytes(t, picture(56, 56, 1))
	url := func(s string) string { return fmt.Sprintf(`{"type":"image_url","image_url":{"url":%q}}`, s) }
	for _, c := range []struct {
		name, body string
		status     int
		want       string
	}{
		{"no JSON", "{", 400, "not a chat completion"},
		{"no messages", `{"messages":[]}`, 400, "messages: empty"},
		{"other model", `{"model":"gpt","messages":[{"role":"user","content":"hi"}]}`, 404, `serves "tiny-mm"`},
		{"content a number", `{"messages":[{"role":"user","content":7}]}`, 400, "messages[0].content"},
		{"truncated image", chat("", good, imageURL(png1[:60], "")), 400, "messages[0].content[1]: "},
		{"bomb", chat("", imageURL(bomb(t, 50000, 50000), "")), 400, "50000 x 50000"},
		{"web address", chat("", url("http://169.254.169.254/latest")), 400, "never fetches media"},
		{"file", chat("", url("file:///etc/passwd")), 400, "--allow-files"},
		{"path", chat("", url("/etc/passwd")), 400, "not a URL"},
		{"not base64", chat("", url("data:image/png;base64,***")), 400, "data: URL"},
		{"plain data", chat("", url("data:image/png,abc")), 400, "not base64"},
		{"a text as image", chat("", url("data:text/html;base64,aGk=")), 400, `"text/html"`},
		{"no url", chat("", `{"type":"image_url"}`), 400, "want {"},
		{"null url", chat("", `{"type":"image_url","image_url":null}`), 400, "no url"},
		{"video", chat("", `{"type":"video_url","video_url":{"url":"data:,"}}`), 400, `"video_url" are not served`},
		{"audio", chat("", `{"type":"input_audio"}`), 400, `"input_audio" are not served`},
		{"no type", chat("", `{}`), 400, "without a type"},
		{"embeds without key", chat("", `{"type":"image_embeds","image_embeds":{"image_grid_thw":[[1,4,4]]}}`), 400, "without uuid"},
		{"embeds without grid", chat("", `{"type":"image_embeds","image_embeds":{},"uuid":"k"}`), 400, "image_grid_thw"},
		{"odd grid", chat("", embeds("[[1,3,4]]", "k")), 400, "want [1, even, even]"},
		{"huge grid", chat("", embeds("[[1,9000000000,4]]", "k")), 400, "each number"},
		{"big grid", chat("", embeds("[[1,1000,1000]]", "k")), 400, "at most 1280"},
		{"two grids", chat("", embeds("[[1,4,4],[1,4,4]]", "k")), 400, "want [[1, h, w]]"},
		{"one key, two images", chat("", embeds("[[1,4,4]]", "k"), embeds("[[1,4,6]]", "k")), 400, "two images"},
		{"long key", chat("", embeds("[[1,4,4]]", strings.Repeat("k", 257))), 400, "257 bytes"},
		{"many items", chat("", good, good, good), 400, "messages[0].content[2]: more than 2"},
		{"large body", chat("", imageURL(make([]byte, 1<<16), "")), 413, "at most 65536"},
		{"bad params", chat(`,"ec_transfer_params":[1]`, good), 400, "ec_transfer_params: "},
		{"two params", chat(offer("k", 4, 8)+`,"extra_args":{"ec_transfer_params":{}}`+``, good), 200, ""},
		{"two that differ", chat(offer("k", 4, 8)+`,"extra_args":{`+offer("k", 5, 8)[1:]+`}`, good), 400, "the two differ"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := r.post(c.body)
			if a.Status != c.status || !strings.Contains(a.Error.Message, c.want) {
				t.Errorf("%d %s; want %d and %q", a.Status, a.Raw, c.status, c.want)
			}
		})
	}
	r.ok(chat("", good))
}

// C29: routers that cannot set the top level put the parameters into extra_args.
func TestTransferParamsAreReadFromEitherPlace(t *testing.T) {
	r := newRig(t, Config{Role: Consumer})
	data := make([]byte, 6*2*testWidth)
	r.pool.pulls("tcp", map[string][]byte{"a": data, "b": data})
	r.ok(chat(offer("a", 6, testWidth), embeds("[[1,4,6]]", "a")))
	r.ok(chat(`,"extra_args":{`+offer("b", 6, testWidth)[1:]+`}`, embeds("[[1,4,6]]", "b")))
}

func TestFilesAreServedFromTheAllowedDirectoryOnly(t *testing.T) {
	dir := t.TempDir()
	img := pngBytes(t, picture(56, 56, 1))
	for name, b := range map[string][]byte{"ok/a.png": img, "secret.png": img} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../secret.png", filepath.Join(dir, "ok", "link.png")); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, Config{AllowFiles: filepath.Join(dir, "ok")})
	for name, want := range map[string]int{"ok/a.png": 200, "secret.png": 400, "ok/../secret.png": 400, "ok/link.png": 400, "ok": 400, "ok/none.png": 400} {
		body := chat("", fmt.Sprintf(`{"type":"image_url","image_url":{"url":%q}}`, "file://"+dir+"/"+name))
		if a := r.post(body); a.Status != want {
			t.Errorf("%s: %d %s, want %d", name, a.Status, a.Raw, want)
		}
	}
}

func TestStreamCarriesTheSameAnswer(t *testing.T) {
	r := newRig(t, Config{})
	a := r.post(chat(`,"stream":true`, imageURL(pngBytes(t, picture(56, 56, 1)), "k")))
	lines := strings.Split(strings.TrimSpace(a.Raw), "\n\n")
	if len(lines) != 3 || lines[2] != "data: [DONE]" {
		t.Fatalf("stream %q", a.Raw)
	}
	var last Answer
	if err := json.Unmarshal([]byte(strings.TrimPrefix(lines[1], "data: ")), &last); err != nil {
		t.Fatal(err)
	}
	if last.Params == nil || last.Ferry == nil || *last.Choices[0].FinishReason != "stop" {
		t.Errorf("last chunk %s", lines[1])
	}
}
