package node

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

const testBlock = 2048

// testConfig is a node of blocks of 2 KiB, 1,024 elements of bfloat16.
func testConfig(t testing.TB, blocks int) Config {
	t.Helper()
	c := DefaultConfig()
	c.Socket = filepath.Join(t.TempDir(), "n.sock")
	c.SideChannel = "127.0.0.1:0"
	c.Admin = "127.0.0.1:0"
	c.ShmDir = shmDir(t)
	c.Pools = []PoolConfig{{
		ECCPUBytes: itoa(blocks * testBlock), Model: "tiny-mm", Dtype: "torch.bfloat16", BlockBytes: testBlock, VLLMVersion: "0.32.0",
	}}
	return c
}

// shmDir is a directory of this test's own on /dev/shm; it must be empty at the test's end.
func shmDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "ferry-test-")
	if err != nil {
		t.Skipf("no /dev/shm to work in: %v", err)
	}
	t.Cleanup(func() {
		left, err := os.ReadDir(dir)
		if err != nil {
			t.Error(err)
		}
		for _, f := range left {
			t.Errorf("left in %s: %s", dir, f.Name())
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func startNode(t testing.TB, c Config) *Node {
	t.Helper()
	n, err := Start(testContext(t), c, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(testContext(t)); err != nil {
			t.Error(err)
		}
	})
	return n
}

func dial(t testing.TB, n *Node) *client.Client {
	t.Helper()
	c, err := client.Dial(testContext(t), n.Ready().Socket, client.Options{Name: t.Name()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func spec(rows int) ec.Spec {
	return ec.Spec{Dtype: "torch.bfloat16", Shape: []int64{int64(rows), testBlock / 2}, Bytes: int64(rows) * testBlock}
}

// payload is rows blocks of bytes that depend on seed.
func payload(rows int, seed uint64) []byte {
	b := make([]byte, rows*testBlock)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func put(t testing.TB, c *client.Client, key string, rows int, seed uint64) {
	t.Helper()
	held, err := c.Put(testContext(t), key, spec(rows), payload(rows, seed))
	if err != nil || held {
		t.Fatalf("Put(%q) = %v, %v", key, held, err)
	}
}

func checkBytes(t testing.TB, c *client.Client, key string, rows int, seed uint64) {
	t.Helper()
	m, err := c.Map(testContext(t), key)
	if err != nil {
		t.Fatalf("Map(%q): %v", key, err)
	}
	defer m.Release()
	checkMapped(t, m, rows, seed)
}

func checkMapped(t testing.TB, m *client.Mapped, rows int, seed uint64) {
	t.Helper()
	if got := bytes.Join(m.Buffers(), nil); !bytes.Equal(got, payload(rows, seed)) {
		t.Fatalf("%q: %d bytes that differ from what was put", m.Info().Key, len(got))
	}
}

// eventually polls, because what it waits for comes from another process or goroutine.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func TestWhatIsPutIsMappedByteForByteByAnotherEngine(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	a, b := dial(t, n), dial(t, n)
	put(t, a, "k", 5, 1)
	checkBytes(t, b, "k", 5, 1)
}

// C6: an encoder-only instance died when the connector already held the item.
func TestPutOfAHeldKeyIsNoError(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	c := dial(t, n)
	put(t, c, "k", 2, 1)
	held, err := c.Put(testContext(t), "k", spec(2), payload(2, 2))
	if err != nil || !held {
		t.Fatalf("second Put = %v, %v; want held", held, err)
	}
	checkBytes(t, c, "k", 2, 1)
	if _, err := c.Put(testContext(t), "k", spec(3), payload(3, 2)); !errors.Is(err, ec.ErrConflict) {
		t.Fatalf("Put with another shape: %v; want ErrConflict", err)
	}
}

func TestTwoNodesFetchFromOneAnotherByteForByte(t *testing.T) {
	for _, plane := range []string{"mapped", "tcp"} {
		t.Run(plane, func(t *testing.T) {
			ca, cb := testConfig(t, 4096), testConfig(t, 4096)
			cb.ShmDir = ca.ShmDir
			ca.Planes, cb.Planes = []string{plane}, []string{plane}
			ca.Checksums, cb.Checksums = true, true
			a, b := dial(t, startNode(t, ca)), dial(t, startNode(t, cb))
			for i, rows := range []int{1, 3, 1024} {
				for dir, from := range []*client.Client{a, b} {
					to := []*client.Client{b, a}[dir]
					key := string(rune('a'+i)) + string(rune('0'+dir))
					put(t, from, key, rows, uint64(i))
					p, err := from.Announce(testContext(t), []client.AnnounceItem{{Key: key, ItemIndices: []int{0}, Metadata: []byte(`{"image_grid_thw":[1,2,2]}`)}})
					if err != nil {
						t.Fatal(err)
					}
					results, err := to.Fetch(testContext(t), p, 0)
					if err != nil {
						t.Fatal(err)
					}
					for r := range results {
						if r.Outcome != ec.FetchReady || r.Plane != plane || r.Bytes != spec(rows).Bytes {
							t.Fatalf("%+v; want ready by %s", r, plane)
						}
					}
					checkBytes(t, to, key, rows, uint64(i))
				}
			}
		})
	}
}

func itoa(n int) string { return strconv.Itoa(n) }
