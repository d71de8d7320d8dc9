package main

import (
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/node"
)

func TestDoctorShowsTheEnvironmentInForce(t *testing.T) {
	for _, c := range []struct{ env, verdict, says string }{
		{"PATH=/bin", good, "no VLLM_EC_, FERRY_ or UCX_ variable"},
		{"VLLM_EC_SIDE_CHANNEL_HOST=10.0.0.1", good, "VLLM_EC_SIDE_CHANNEL_HOST=10.0.0.1"},
		{"FERRY_SIDE_CHANNEL=127.0.0.1:1", good, "FERRY_SIDE_CHANNEL=127.0.0.1:1"},
		{"FERRY_SIDECHANNEL=127.0.0.1:1", warn, "does nothing"},
		{"UCX_NET_DEVICES=mlx5_0:1", good, "UCX_NET_DEVICES=mlx5_0:1"},
		{"UCX_TLS=tcp", warn, "kept from RDMA"},
		{"UCX_TLS=rc,sm", good, "UCX_TLS=rc,sm"},
	} {
		f := checkEnv([]string{c.env})
		if len(f) != 1 || f[0].Verdict != c.verdict || !strings.Contains(f[0].Detail+f[0].Fix, c.says) {
			t.Errorf("%s: %+v", c.env, f)
		}
	}
}

// C52: free, total and wanted are all said, in bytes too.
func TestDoctorComparesSharedMemoryWithWhatIsWanted(t *testing.T) {
	c := node.DefaultConfig()
	c.Pools = []node.PoolConfig{{ECCPUBytes: "1KiB"}}
	if f := checkShm(c); f.Verdict != good || !strings.Contains(f.Detail, "bytes), 1024 bytes wanted") {
		t.Errorf("%+v", f)
	}
	c.Pools = append(c.Pools, node.PoolConfig{ECCPUBytes: "9000TiB"})
	if f := checkShm(c); f.Verdict != fail || !strings.Contains(f.Fix, "--shm-size") || !strings.Contains(f.Fix, "emptyDir") {
		t.Errorf("%+v", f)
	}
	c.ShmDir = t.TempDir()
	c.Pools = nil
	if f := checkShm(c); f.Verdict == fail {
		t.Errorf("%+v", f)
	}
}
