package nixltest

import (
	"strings"
	"testing"
)

// report is a test that notes how it ends.
type report struct {
	testing.TB
	failed bool
}

func (r *report) Helper()               {}
func (r *report) Logf(string, ...any)   {}
func (r *report) Fatalf(string, ...any) { r.failed = true }

func TestOnlyUCXsOwnWordsAreAnExcuse(t *testing.T) {
	for _, c := range []struct {
		said           string
		ended, crashed bool
	}{
		{"[1733022934.123456] [host-1:4711:0:4713] ucp_request.inl:319  Fatal: unexpected error: Endpoint timeout", true, true},
		{"[vm:6034 :0:6215] ucp_request.inl:319  Fatal: unexpected error: Endpoint timeout", true, true}, // a pid is five characters wide
		{`level=WARN msg="nixl: agent process" pid=7 says="[1733022934.1] [h:7:0:7]   stubs.c:107  Assertion ` + "`0'" + ` failed"`, true, true},
		{"Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File \"nixl/_api.py\"", false, true},
		{"Traceback (most recent call last):\nRuntimeError: Fatal Python error: Segmentation fault was said before", false, false},
		{"SIGABRT: abort\nPC=0x497b41 m=0 sigcode=0", false, false},
		{"Fatal: a message of another program", false, false},
		{"[1733022934.123456] [host-1:4711:0:4713] ucp_ep.c:12  ERROR  Endpoint timeout", false, false},
		{"", false, false},
	} {
		r := &report{TB: t}
		if EndedByUCX(r, "it", []byte(c.said)) != c.ended || r.failed == c.ended {
			t.Errorf("ended: %q", c.said)
		}
		r = &report{TB: t}
		if Crashed(r, "it", []byte(c.said)) != c.crashed || r.failed == c.crashed {
			t.Errorf("crashed: %q", c.said)
		}
	}
}

func TestWhatOneAgentSaidIsFound(t *testing.T) {
	log := strings.Join([]string{
		`level=WARN msg="nixl: agent process" role=serve pid=7 says=a`,
		`level=WARN msg="nixl: agent process" role=serve pid=77 says=b`,
		`level=WARN msg="nixl: agent process" role=serve pid=7 says=c`,
		`level=ERROR msg="nixl: an agent process died" role=fetch pid=77 err="exit status 2" reason=abort`,
	}, "\n")
	said, died := AgentSaid([]byte(log), 7)
	if strings.Count(string(said), "\n") != 2 || died || !strings.Contains(string(said), "says=c") || strings.Contains(string(said), "says=b") {
		t.Errorf("%v %q", died, said)
	}
	if _, died := AgentSaid([]byte(log), 77); !died {
		t.Error("it did not die")
	}
}
