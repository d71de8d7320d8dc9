package demo

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/tensorferry/tensorferry/ec"
)

// Image is what became of one image file.
type Image struct {
	Name     string   `json:"image"`
	Width    int      `json:"pixels_x"`
	Height   int      `json:"pixels_y"`
	Key      string   `json:"key,omitempty"`
	Shape    []int64  `json:"shape,omitempty"`
	Bytes    int64    `json:"bytes"`
	Digest   string   `json:"sha256,omitempty"`
	EncodeMS float64  `json:"encode_ms"`
	PullMS   float64  `json:"pull_ms"`
	Plane    string   `json:"plane,omitempty"`
	Checked  bool     `json:"checked"`            // equal to an independent encode on engine D, byte for byte
	Second   string   `json:"second,omitempty"`   // where a second request took it from
	Third    string   `json:"third,omitempty"`    // where the third engine took it from
	Skipped  string   `json:"skipped,omitempty"`  // why the file cannot be used
	Failures []string `json:"failures,omitempty"` // checks that do not hold
}

// Summary counts.
type Summary struct {
	OK      bool  `json:"ok"` // at least one image, and every check of every image that could be read holds
	Passed  int   `json:"passed"`
	Failed  int   `json:"failed"`
	Skipped int   `json:"skipped"`
	Bytes   int64 `json:"bytes"` // pulled
}

// Report is the outcome of a demo.
type Report struct {
	Images  []Image
	Summary Summary
}

func (r *Report) summarize() {
	for _, i := range r.Images {
		switch {
		case i.Skipped != "":
			r.Summary.Skipped++
		case len(i.Failures) > 0:
			r.Summary.Failed++
		default:
			r.Summary.Passed++
			if i.Plane != ec.PlaneLocal {
				r.Summary.Bytes += i.Bytes
			}
		}
	}
	r.Summary.OK = r.Summary.Passed > 0 && r.Summary.Failed == 0
}

// Print writes the table and what it means.
func (r *Report) Print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if r.Summary.Passed+r.Summary.Failed > 0 {
		fmt.Fprintln(w, "image\tpixels\trows x width\tbytes\tencode ms\tpull ms\tplane\tGB/s\tcheck\tsecond request\tthird engine")
	}
	for _, i := range r.Images {
		if i.Skipped != "" {
			continue
		}
		check := "equal"
		if !i.Checked {
			check = "NOT EQUAL"
		}
		if len(i.Failures) > 0 {
			check += " (failed)"
		}
		rate := "-"
		if v := i.rate(); v > 0 {
			rate = fmt.Sprintf("%.2f", v/1e9)
		}
		shape := make([]string, len(i.Shape))
		for n, s := range i.Shape {
			shape[n] = strconv.FormatInt(s, 10)
		}
		fmt.Fprintf(w, "%s\t%d x %d\t%s\t%d\t%.1f\t%.2f\t%s\t%s\t%s\t%s\t%s\n",
			i.Name, i.Width, i.Height, strings.Join(shape, " x "), i.Bytes, i.EncodeMS, i.PullMS, dash(i.Plane), rate, check, dash(i.Second), dash(i.Third))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	var b strings.Builder
	for _, i := range r.Images {
		if i.Skipped != "" {
			fmt.Fprintf(&b, "skipped %s: %s\n", i.Name, i.Skipped)
		}
		for _, f := range i.Failures {
			fmt.Fprintf(&b, "FAILED %s: %s\n", i.Name, f)
		}
	}
	s := r.Summary
	switch {
	case s.OK:
		fmt.Fprintf(&b, "%d of %d images: encoded once on node A, pulled by node B (%d bytes), mapped and equal byte for byte; second requests encoded nothing; a third engine on node A read them in place.",
			s.Passed, len(r.Images), s.Bytes)
	case s.Passed+s.Failed == 0:
		fmt.Fprint(&b, "No usable image.")
	default:
		fmt.Fprintf(&b, "%d of %d images FAILED.", s.Failed, len(r.Images))
	}
	if s.Skipped > 0 {
		fmt.Fprintf(&b, " %d skipped.", s.Skipped)
	}
	_, err := fmt.Fprintln(out, b.String())
	return err
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
