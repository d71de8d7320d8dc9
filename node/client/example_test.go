package client_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/node/client"
)

// One engine saves an encoding and announces it; another, whose node is another one, fetches and reads it.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "ferry")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	// In real life these are two processes, `ferry node`, on two machines.
	stop1, socket1 := startNode(ctx, dir, "1")
	defer stop1()
	stop2, socket2 := startNode(ctx, dir, "2")
	defer stop2()

	// The engine that encodes: two rows of 1,024 numbers of bfloat16.
	encoder, err := client.Dial(ctx, socket1, client.Options{Name: "encoder"})
	if err != nil {
		log.Fatal(err)
	}
	defer encoder.Close()
	spec := ec.Spec{Dtype: "torch.bfloat16", Shape: []int64{2, 1024}, Bytes: 4096}
	r, err := encoder.Reserve(ctx, "hash-of-an-image", spec) // ErrHeld: it is there; ErrPending: another engine is at it
	if err != nil {
		log.Fatal(err)
	}
	for _, b := range r.Buffers() { // the pool itself: a GPU would copy here
		for i := range b {
			b[i] = 42
		}
	}
	if err := r.Commit(ctx); err != nil {
		log.Fatal(err)
	}
	params, err := encoder.Announce(ctx, []client.AnnounceItem{{Key: "hash-of-an-image", Metadata: []byte(`{"image_grid_thw":[1,2,4]}`)}})
	if err != nil {
		log.Fatal(err)
	}

	// params is ec_transfer_params, as JSON. The orchestrator carries it to the engine that decodes.
	decoder, err := client.Dial(ctx, socket2, client.Options{Name: "decoder"})
	if err != nil {
		log.Fatal(err)
	}
	defer decoder.Close()
	results, err := decoder.FetchMap(ctx, params, 0)
	if err != nil {
		log.Fatal(err)
	}
	for f := range results {
		if f.Outcome != ec.FetchReady {
			log.Fatalf("%s: %v, %s: encode it here", f.Key, f.Outcome, f.Reason)
		}
		fmt.Println(f.Key, f.Bytes, f.Mapped.Buffers()[0][0])
		f.Mapped.Release()
	}
	// Output: hash-of-an-image 4096 42
}

func startNode(ctx context.Context, dir, name string) (stop func(), socket string) {
	c := node.DefaultConfig()
	c.Socket = filepath.Join(dir, name)
	c.SideChannel, c.Admin = "127.0.0.1:0", node.AdminOff
	c.Planes = []string{"tcp"}
	c.Pools = []node.PoolConfig{{ECCPUBytes: "1MiB", Model: "tiny", Dtype: "torch.bfloat16", BlockBytes: 2048, VLLMVersion: "0.32.0"}}
	n, err := node.Start(ctx, c, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		log.Fatal(err)
	}
	return func() {
		if err := n.Close(ctx); err != nil {
			log.Print(err)
		}
	}, n.Ready().Socket
}
