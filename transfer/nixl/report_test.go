package nixl

import (
	"context"
	"slices"
	"testing"

	binding "github.com/tensorferry/tensorferry/nixl"
)

func TestAReportSaysWhatIsThereAndWhetherItWorks(t *testing.T) {
	r := Examine(t.Context(), processes(t))
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	if r.Path == "" || r.Why == "" || r.Version == "" || !slices.Contains(r.Plugins, "UCX") || len(r.Transports) == 0 || r.SelfTest <= 0 || len(r.Candidates) == 0 {
		t.Errorf("%+v", r)
	}
	t.Logf("%+v", r)
}

func TestAReportSaysWhatWentWrong(t *testing.T) {
	f := binding.NewFake()
	f.Fail(binding.FakeCreate, 0, binding.StatusBackend)
	if r := Examine(t.Context(), Options{Loaded: f.Library()}); r.Err == nil || r.Version != "fake" {
		t.Errorf("%+v", r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r := Examine(ctx, Options{Loaded: binding.NewFake().Library()}); r.Err == nil {
		t.Errorf("%+v", r)
	}
}

func TestTransportsAreTakenFromWhatUCXSays(t *testing.T) {
	for line, want := range map[string]string{
		"[1796062464.1] [vm:9 :0] ucp_worker.c:1888 UCX  INFO    ep_cfg[1]: nothing":                         "",
		"[17.1] [vm:9:0] ucp_worker.c:1888 UCX  INFO  0x55 intra-node cfg#1 rma_am(tcp/lo)  am(cma/memory) ": "intra-node: rma_am(tcp/lo) am(cma/memory)",
		"self cfg#0 am(self/memory)": "self: am(self/memory)",
		"":                           "",
	} {
		if got := transport(line); got != want {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
}

func TestTheOperatorsVariablesWin(t *testing.T) {
	got := variables([]string{"UCX_LOG_FILE=/tmp/x", "UCX_TLS=tcp", "PATH=/bin", "NIXL_LOG_LEVEL=INFO", "UCX_EMPTY="})
	for _, want := range []Variable{{"UCX_LOG_FILE", "/tmp/x", false}, {"UCX_TLS", "tcp", false}, {"NIXL_LOG_LEVEL", "INFO", false}, {"UCX_DEBUG_SIGNO", "0", true}} {
		if !slices.Contains(got, want) {
			t.Errorf("no %+v in %+v", want, got)
		}
	}
}
