// Package measure compares ways to do one thing in one run. The candidates take turns, so that what else the machine does hits all
// of them, and are compared by the median of the ratios within a turn.
package measure

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Candidate is one way. Run does it once and says how long it took.
type Candidate struct {
	Name string
	Run  func() (time.Duration, error)
}

// Timed makes a candidate of a function that is timed from call to return.
func Timed(name string, f func() error) Candidate {
	return Candidate{Name: name, Run: func() (time.Duration, error) {
		start := time.Now()
		err := f()
		return time.Since(start), err
	}}
}

// Result is what one candidate took, turn by turn.
type Result struct {
	Name  string
	Times []time.Duration
}

// Median is the median time.
func (r Result) Median() time.Duration { return median(r.Times) }

// Quartiles are the times a quarter and three quarters of the turns stayed under.
func (r Result) Quartiles() (lo, hi time.Duration) {
	s := slices.Sorted(slices.Values(r.Times))
	return s[len(s)/4], s[len(s)*3/4]
}

// Faster is how many times faster r is than base: the median of the turns' ratios.
func (r Result) Faster(base Result) float64 {
	ratios := make([]float64, len(r.Times))
	for i := range ratios {
		ratios[i] = float64(base.Times[i]) / float64(r.Times[i])
	}
	return median(ratios)
}

func median[T time.Duration | float64](v []T) T {
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// Run gives each candidate warm turns that do not count and then rounds that do. The order changes from round to round.
func Run(warm, rounds int, cs []Candidate) ([]Result, error) {
	out := make([]Result, len(cs))
	for i, c := range cs {
		out[i] = Result{Name: c.Name, Times: make([]time.Duration, 0, rounds)}
	}
	for round := range warm + rounds {
		for j := range cs {
			i := (round + j) % len(cs)
			d, err := cs[i].Run()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", cs[i].Name, err)
			}
			if round >= warm {
				out[i].Times = append(out[i].Times, d)
			}
		}
	}
	return out, nil
}

// GBs is the speed of moving n bytes in d, in 10^9 bytes a second.
func GBs(n int64, d time.Duration) float64 { return float64(n) / float64(d.Nanoseconds()) }

// Size prints a size as people write it.
func Size(n int64) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}

// Header prints what a table of results must say about its machine and how it came about.
func Header(w io.Writer, title, command string, rounds int) {
	Title(w, title, command)
	fmt.Fprintf(w, "Candidates take turns; medians of %d turns after warm-up; a ratio is the median of the ratios within a turn.\n\n", rounds)
}

// Title is Header where nothing takes turns.
func Title(w io.Writer, title, command string) {
	fmt.Fprintf(w, "# %s\n\n    %s\n\n%s, %s/%s, %d cores, load average %s, %s.\n\n",
		title, command, time.Now().UTC().Format(time.DateOnly), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), load(), runtime.Version())
}

// load is the number of processes that wanted a core in the last minute: with more than a few, the figures say little.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(string(b), " ")
	return first
}

// Row prints a line of a Markdown table.
func Row(w io.Writer, cells ...string) { fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | ")) }

// Table prints the head of a Markdown table.
func Table(w io.Writer, cells ...string) {
	Row(w, cells...)
	rule := make([]string, len(cells))
	for i := range rule {
		rule[i] = "---"
	}
	Row(w, rule...)
}

// Milliseconds writes a time for a table.
func Milliseconds(d time.Duration) string {
	v := float64(d.Nanoseconds()) / 1e6
	if v < 10 {
		return fmt.Sprintf("%.3f", v)
	}
	return fmt.Sprintf("%.1f", v)
}
