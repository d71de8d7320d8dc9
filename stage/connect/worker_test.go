package connect

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/deploy"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

const tooLong = 60 * time.Second

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), tooLong)
	t.Cleanup(cancel)
	return ctx
}

// stageOf reads a deployment and gives one worker of it.
func stageOf(t *testing.T, text string, id int) *deploy.Stage {
	t.Helper()
	path := filepath.Join(t.TempDir(), "deploy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := deploy.Load(path, func(string) (string, bool) { return "", false })
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.Stage(id, deploy.Place{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func openWorker(t *testing.T, text string, id int) *Worker {
	t.Helper()
	w, err := OpenWorker(within(t), stageOf(t, text, id), Options{Bytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), tooLong)
		defer cancel()
		if err := w.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return w
}

// freePort is one that was free a moment ago.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// chain is three stages, of which the one in the middle receives and publishes.
func chain(port int) string {
	return `
connectors:
  edge: {name: FerryConnector, extra: {host: 127.0.0.1, zmq_port: ` + strconv.Itoa(port) + `, planes: [mapped, tcp]}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: edge}}
  - {stage_id: 1, input_connectors: {from_stage_0: edge}, output_connectors: {to_stage_2: edge}}
  - {stage_id: 2, input_connectors: {from_stage_1: edge}}
`
}

func TestAStageInTheMiddlePublishesWhatItReceived(t *testing.T) {
	text := chain(freePort(t))
	first, middle, last := openWorker(t, text, 0), openWorker(t, text, 1), openWorker(t, text, 2)
	if from, to := middle.Edges(); len(from) != 1 || from[0] != 0 || len(to) != 1 || to[0] != 2 {
		t.Error(from, to)
	}
	x, err := tensor.Of(make([]float32, 1<<18), 1<<18)
	if err != nil {
		t.Fatal(err)
	}
	want := tensor.List{x, tensor.String("and text")}
	to1, ok := first.To(1)
	if !ok {
		t.Fatal("stage 0 has no edge to stage 1")
	}
	if _, err := to1.Put(within(t), "k", want, stage.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	from0, sender, ok := middle.From(0)
	to2, both := middle.To(2)
	if !ok || !both || from0 != to2 {
		t.Fatal("the edges of the middle stage do not share a connector")
	}
	got, err := from0.Get(within(t), stage.Request{Key: "k", From: sender, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := to2.(*Connector).Republish(within(t), "k", got, stage.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	from1, sender, ok := last.From(1)
	if !ok {
		t.Fatal("stage 2 has no edge from stage 1")
	}
	got, err = from1.Get(within(t), stage.Request{Key: "k", From: sender, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	if !tensor.Equal(got.Root, want) {
		t.Error("another payload came out than went in")
	}
	if err := got.Release(); err != nil {
		t.Error(err)
	}
	if !first.Healthy() || !middle.Healthy() || !last.Healthy() {
		t.Error("a worker is not healthy")
	}
	if _, ok := last.To(3); ok {
		t.Error("an edge that is not in the file")
	}
}

func TestAPortThatTheFileNamesIsNotReplacedByAnother(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	_, err = OpenWorker(within(t), stageOf(t, chain(port), 0), Options{Bytes: 16 << 20})
	if err == nil || !strings.Contains(err.Error(), strconv.Itoa(port)) {
		t.Error(err)
	}

	s := stageOf(t, chain(port), 0)
	s.Outgoing[0].AnyPort = true
	w, err := OpenWorker(within(t), s, Options{Bytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close(within(t))
	c, _ := w.To(1)
	if got := c.(*Connector).Endpoint().Port; got == 0 || got == port {
		t.Error(got)
	}
}

func TestANixlConnectorDoesNotFallBackToAnythingElse(t *testing.T) {
	text := strings.Replace(strings.Replace(chain(freePort(t)), "FerryConnector", "NixlConnector", 1), ", planes: [mapped, tcp]", "", 1)
	_, err := OpenWorker(within(t), stageOf(t, text, 0), Options{Bytes: 16 << 20, Library: "/nowhere/libnixl_capi.so"})
	if !errors.Is(err, nixl.ErrMissing) {
		t.Error(err)
	}
}

func TestSettingsForDeviceMemoryAreRefused(t *testing.T) {
	for _, extra := range []string{"memory_type: VRAM", "receive_device: cuda"} {
		text := strings.Replace(chain(1234), "planes: [mapped, tcp]", extra, 1)
		_, err := OpenWorker(within(t), stageOf(t, text, 1), Options{Bytes: 16 << 20})
		if key, _, _ := strings.Cut(extra, ":"); !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", extra, err)
		}
	}
}

func TestPlanesAreNamedOnceAndByTheirNames(t *testing.T) {
	for _, names := range [][]string{{}, {"rdma"}, {"tcp", "tcp"}} {
		if _, err := Planes(within(t), Options{Planes: names}); !errors.Is(err, ErrOptions) {
			t.Errorf("%q: %v", names, err)
		}
	}
}

func TestAStartThatFailsLeavesNothing(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dir := t.TempDir()
	taken := &stage.Endpoint{Host: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port}
	_, err = Open(within(t), Options{Dir: dir, Planes: []string{"mapped", "tcp"}, Bytes: 1 << 20, Bind: taken})
	if !errors.Is(err, unix.EADDRINUSE) {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Error("left:", left)
	}
}
