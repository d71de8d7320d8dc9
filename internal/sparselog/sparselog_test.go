package sparselog

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestWhatIsLeftOutIsCountedInTheNextLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		var c Cause
		if !c.Idle() {
			t.Error("a fresh one is not idle")
		}
		for range 1000 {
			c.Warn(log, "refused", "by", "us")
		}
		if c.Idle() {
			t.Error("idle with 999 that had no line")
		}
		time.Sleep(Every)
		c.Info(log, "refused")
		c.Info(log, "refused")
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 2 || !strings.HasSuffix(lines[0], "level=WARN msg=refused by=us count=1") || !strings.HasSuffix(lines[1], "level=INFO msg=refused count=1000") {
			t.Errorf("want a line for the first, and one for the 999 others with the next:\n%s", out.String())
		}
	})
}

func TestIdleAgainOnceALineMayComeAndNoneIsOwed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Cause
		c.Due()
		time.Sleep(Every - 1)
		if c.Idle() {
			t.Error("idle before the next line may come")
		}
		time.Sleep(1)
		if !c.Idle() {
			t.Error("not idle when the next line may come")
		}
	})
}

func TestALineForEachOfAFewAndNoneForALoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := Cause{Burst: 8}
		lines := func(n, want int, pause time.Duration, when string) {
			t.Helper()
			got := 0
			for range n {
				time.Sleep(pause)
				if _, due := c.Due(); due {
					got++
				}
			}
			if got != want {
				t.Errorf("%s: %d lines, want %d", when, got, want)
			}
		}
		lines(8, 8, 0, "those that come together")
		lines(1000, 1, Every/1000, "one in a loop, for as long as a line stands for")
		time.Sleep(time.Hour)
		lines(1000, 8, 0, "after an hour of peace")
	})
}
