package boottime

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Getenv("BOOTTIME_SAY") != "" {
		os.Stdout.WriteString(strconv.FormatInt(Now(), 10))
		return
	}
	os.Exit(m.Run())
}

func TestAllTimeNamespacesAgree(t *testing.T) {
	if _, known := Offset(); !known {
		t.Skip("this process's time namespace is not known")
	}
	if err := exec.Command("unshare", "-T", "--boottime", "1000", "true").Run(); err != nil {
		t.Skipf("no time namespaces here (unshare -T): %v", err)
	}
	for _, offset := range []string{"0", "1000", "100000000"} {
		before := Now()
		cmd := exec.Command("unshare", "-T", "--monotonic", offset, "--boottime", offset, os.Args[0])
		cmd.Env = append(os.Environ(), "BOOTTIME_SAY=1")
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		after := Now()
		there, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
		if err != nil || there < before || there > after {
			t.Errorf("%s seconds ahead: %v, %v; want a time from %v to %v", offset, there, err, before, after)
		}
	}
}

func TestOffsetsAreReadOrNotKnown(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"monotonic           0         0\nboottime            0         0\n": 0,
		"monotonic  1 2\nboottime  -5 250000000\n":                           -5*time.Second + 250*time.Millisecond,
		"boottime 3 0":                  3 * time.Second,
		"":                              -1,
		"monotonic 0 0\n":               -1,
		"boottime x 0\n":                -1,
		"boottime 1\n":                  -1,
		"boottime 1e9 0\n":              -1,
		"boottime 9999999999999999 0\n": -1,
	} {
		got, ok := parse([]byte(text))
		if ok != (want != -1) || ok && got != want {
			t.Errorf("%q: %v, %v; want %v", text, got, ok, want)
		}
	}
}
