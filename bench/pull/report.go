package main

import (
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
)

// verdict is a target and what came out.
type verdict struct {
	target, measured string
	met              bool
}

// faster are targets of Go <- Go over mapped against vLLM <- vLLM.
var faster = map[workload]float64{{1, 64 * kib}: 20, {1, 16 * mib}: 3, {200, 2 * mib}: 4}

// Targets of Go <- Go over nixl against the bare READ.
const (
	nixlShare    = 1.10
	nixlOverhead = 150 * time.Microsecond
)

func (b *bench) report(w workload, results []measure.Result) {
	by := map[string]measure.Result{}
	for _, r := range results {
		by[r.Name] = r
	}
	base, hasBase := by[vllmVLLM]
	cells := []string{w.String()}
	for _, name := range candidates {
		r, ok := by[name]
		if !ok {
			cells = append(cells, "not run")
			continue
		}
		cell := measure.Milliseconds(r.Median())
		if w.count > 1 {
			cell += fmt.Sprintf(", %.1f GB/s", measure.GBs(w.total(), r.Median()))
		}
		if hasBase && name != vllmVLLM {
			cell += fmt.Sprintf(" (%.1fx)", r.Faster(base))
		}
		cells = append(cells, cell)
	}
	measure.Row(os.Stdout, cells...)
	if want, ok := faster[w]; ok && hasBase {
		got := by[goMapped].Faster(base)
		b.verdict(fmt.Sprintf("%v over mapped: %.0fx vLLM <- vLLM", w, want), fmt.Sprintf("%.1fx", got), got >= want)
	}
	raw, hasRaw := by[rawNIXL]
	switch {
	case !hasRaw || w.count > 1:
	case w.bytes >= 16*mib:
		got := 1 / by[goNIXL].Faster(raw)
		b.verdict(fmt.Sprintf("%v over nixl: within 10%% of the bare READ", w), fmt.Sprintf("%+.0f%%", (got-1)*100), got <= nixlShare)
	case w.bytes == 64*kib:
		got := over(by[goNIXL], raw)
		b.verdict(fmt.Sprintf("%v over nixl: at most %v over the bare READ", w, nixlOverhead), got.Round(time.Microsecond).String(), got <= nixlOverhead)
	}
}

func (b *bench) verdict(target, measured string, met bool) {
	b.verdicts = append(b.verdicts, verdict{target, measured, met})
}

// over is how much longer r took than base: the median of the turns' differences.
func over(r, base measure.Result) time.Duration {
	d := make([]time.Duration, len(r.Times))
	for i := range d {
		d[i] = r.Times[i] - base.Times[i]
	}
	slices.Sort(d)
	return d[len(d)/2]
}
