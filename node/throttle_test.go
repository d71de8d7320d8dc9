package node

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestRefusedEnginesDoNotFillTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		var l logLimit
		for range 1000 {
			l.info(log, "engine refused")
		}
		time.Sleep(logEvery)
		l.info(log, "engine refused")
		l.info(log, "engine refused")
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != 2 || !strings.Contains(lines[0], "count=1") || !strings.Contains(lines[1], "count=1000") {
			t.Errorf("want a line for the first, and one for the 999 others with the next:\n%s", out.String())
		}
	})
}

func TestALineForEachOfAFewAndNoneForALoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		l := logLimit{burst: 8}
		lines := func(want int, when string) {
			t.Helper()
			if got := strings.Count(out.String(), "\n"); got != want {
				t.Errorf("%s: %d lines, want %d", when, got, want)
			}
			out.Reset()
		}
		for range 8 {
			l.info(log, "engine connected")
		}
		lines(8, "engines that start together")
		for range 1000 {
			time.Sleep(logEvery / 1000)
			l.info(log, "engine connected")
		}
		lines(1, "one in a loop, for as long as a line stands for")
		time.Sleep(time.Hour)
		for range 1000 {
			l.info(log, "engine connected")
		}
		lines(8, "after an hour of peace")
	})
}
