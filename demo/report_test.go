package demo

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSummaryIsGoodOnlyIfEveryReadableImagePassed(t *testing.T) {
	pass := Image{Name: "a.png", Shape: []int64{4, 8}, Bytes: 64, PullMS: 1, Plane: "tcp", Checked: true}
	twin := Image{Name: "b.png", Shape: []int64{4, 8}, Bytes: 64, Plane: "local", Checked: true}
	fail := Image{Name: "c.png", Failures: []string{"pulled: engine D took it from: encoded"}}
	skip := Image{Name: "d.png", Skipped: "the image is damaged"}
	for _, c := range []struct {
		name   string
		images []Image
		want   Summary
		says   string
	}{
		{"all pass", []Image{pass, twin}, Summary{true, 2, 0, 0, 64}, "2 of 2 images: encoded once"},
		{"one is broken", []Image{pass, skip}, Summary{true, 1, 0, 1, 64}, "skipped d.png: the image is damaged"},
		{"one fails", []Image{pass, fail}, Summary{false, 1, 1, 0, 64}, "FAILED c.png: pulled: engine D took it from: encoded"},
		{"all are broken", []Image{skip}, Summary{false, 0, 0, 1, 0}, "No usable image. 1 skipped."},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := Report{Images: c.images}
			r.summarize()
			if r.Summary != c.want {
				t.Errorf("%+v, want %+v", r.Summary, c.want)
			}
			var b strings.Builder
			if err := r.Print(&b); err != nil || !strings.Contains(b.String(), c.says) {
				t.Errorf("%v\n%s", err, b.String())
			}
		})
	}
}

func TestImagesOfADirectoryAreReadAndBrokenOnesNamed(t *testing.T) {
	dir := t.TempDir()
	good, err := photographs.ReadFile("images/chelsea.png")
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"b.PNG": good, "a.jpg": []byte("no image"), "notes.txt": []byte("x")} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "c.png"), 0o700); err != nil {
		t.Fatal(err)
	}
	got, err := load(dir)
	if err != nil || len(got) != 3 {
		t.Fatal(got, err)
	}
	if p := got[0]; p.name != "a.jpg" || !strings.Contains(p.broken, "not a JPEG or PNG") {
		t.Errorf("%s: %s", p.name, p.broken)
	}
	if p := got[1]; p.name != "b.PNG" || p.broken != "" || p.width != 451 || p.height != 300 {
		t.Errorf("%s: %d x %d, %s", p.name, p.width, p.height, p.broken)
	}
	if p := got[2]; p.name != "c.png" || !strings.Contains(p.broken, "not a regular file") {
		t.Errorf("%s: %s", p.name, p.broken)
	}
}

func TestPhotographsTogetherStaySmallAndAreSourced(t *testing.T) {
	pictures, err := load("")
	if err != nil {
		t.Fatal(err)
	}
	sources, err := os.ReadFile("images/SOURCES.md")
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for _, p := range pictures {
		total += len(p.data)
		if p.broken != "" || !strings.Contains(string(sources), "`"+p.name+"`") {
			t.Errorf("%s: %s, or it has no source", p.name, p.broken)
		}
	}
	if total > 600<<10 {
		t.Errorf("%d bytes of photographs", total)
	}
}
