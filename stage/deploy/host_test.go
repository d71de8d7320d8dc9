package deploy

import (
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTheWaysToSayAuto(t *testing.T) {
	for _, host := range []string{"auto", "AUTO", "", "*", "0.0.0.0", "::"} {
		d := mustLoad(t, pair(`{name: NixlConnector, extra: {host: "`+host+`"}}`))
		if s := mustStage(t, d, 0, Place{}); s.Outgoing[0].Bind.Host != here {
			t.Errorf("%q: %+v", host, s)
		}
		if s := mustStage(t, d, 1, Place{}); s.Incoming[0].Sender.Host != here {
			t.Errorf("%q: %+v", host, s)
		}
	}
	for _, host := range []string{"10.0.0.1:5", "[::1]", "a b", "http://x", "::ffff:0.0.0.0", "::0"} {
		if _, err := load(t, pair(`{name: NixlConnector, extra: {host: "`+host+`"}}`)); err == nil {
			t.Errorf("%q is a host", host)
		}
	}
}

func TestDetectionFindsAnAddressOfThisMachine(t *testing.T) {
	host, _ := detectHost()
	if a, err := netip.ParseAddr(host); err != nil || a.IsUnspecified() || a.Zone() != "" {
		t.Errorf("%q: %v", host, err)
	}
	s, err := (&Deployment{Stages: []StageInfo{{ID: 0}}, detect: detectHost}).Stage(0, Place{})
	if err != nil || len(s.Warnings) > 0 {
		t.Error("a stage without edges has no host to detect", s, err)
	}
}

// A network namespace of its own has loopback alone, then an address, then a route.
func TestDetectionWithoutARouteSaysSo(t *testing.T) {
	type result struct {
		host, warning string
	}
	results := make(chan result, 3)
	failed := make(chan error, 1)
	go func() {
		defer close(results)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			failed <- err
			return
		}
		for _, steps := range [][]string{
			{"link set lo up"},
			{"link add ferry0 type veth peer name ferry1", "addr add 192.0.2.9/24 dev ferry0", "link set ferry0 up", "link set ferry1 up"},
			{"route add default via 192.0.2.1"},
		} {
			for _, step := range steps {
				// The child is made by this thread, so it is in this thread's namespace.
				if text, err := exec.Command("ip", strings.Fields(step)...).CombinedOutput(); err != nil {
					failed <- fmt.Errorf("ip %s: %w: %s", step, err, text)
					return
				}
			}
			host, warning := detectHost()
			results <- result{host, warning}
		}
	}()
	var got []result
	for r := range results {
		got = append(got, r)
	}
	select {
	case err := <-failed:
		t.Skip("no network namespace here: ", err)
	default:
	}
	for i, want := range []result{{"127.0.0.1", "loopback alone"}, {"192.0.2.9", "no route"}, {"192.0.2.9", ""}} {
		if got[i].host != want.host || (want.warning == "") != (got[i].warning == "") || !strings.Contains(got[i].warning, want.warning) {
			t.Errorf("step %d: %+v, want %+v", i, got[i], want)
		}
	}
}

func TestAFallBackOfDetectionIsWarnedOfOnce(t *testing.T) {
	d := mustLoad(t, []string{"main.yaml", `
connectors: {n: {name: NixlConnector, extra: {host: auto}}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: n}}
  - {stage_id: 1, output_connectors: {to_stage_2: n}}
  - {stage_id: 2}
`})
	d.detect = func() (string, string) { return "127.0.0.1", "loopback alone" }
	s := mustStage(t, d, 1, Place{})
	if len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0].String(), `main.yaml: connectors.n.extra.host: "127.0.0.1": loopback alone`) {
		t.Errorf("%v", s.Warnings)
	}
	if s.Incoming[0].Sender.Host != "127.0.0.1" || s.Outgoing[0].Bind.Host != "127.0.0.1" {
		t.Errorf("%+v", s)
	}
}

// Somebody elsewhere who is told a loopback address asks themselves.
func TestLoopbackWithPeersElsewhereIsWarnedOf(t *testing.T) {
	for extra, warned := range map[string]bool{
		`host: 127.0.0.1, sender_host: 10.0.0.2`: true,
		`host: localhost, sender_host: node-b`:   true,
		`host: "::1", sender_host: 10.0.0.2`:     true,
		`host: 127.0.0.1`:                        false,
		`host: 127.0.0.1, sender_host: "::1"`:    false,
		`host: 10.0.0.1, sender_host: 10.0.0.2`:  false,
	} {
		s := mustStage(t, mustLoad(t, pair("{name: NixlConnector, extra: {"+extra+"}}")), 0, Place{})
		if (len(s.Warnings) == 1) != warned {
			t.Errorf("%s: %v", extra, s.Warnings)
		}
		if warned && !strings.Contains(s.Warnings[0].Text, "ask themselves") {
			t.Errorf("%s: %v", extra, s.Warnings)
		}
	}
}
