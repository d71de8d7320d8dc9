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
