package connect_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
	"github.com/tensorferry/tensorferry/tensor"
)

// One stage puts, the next gets. Both ends are here; they would be two processes, or two machines.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	thinker, err := connect.Open(ctx, connect.Options{
		Bind: &stage.Endpoint{Host: "127.0.0.1"}, Planes: []string{"mapped", "tcp"}, Bytes: 64 << 20, Sum: true,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer thinker.Close(ctx)
	hidden, err := tensor.Of([]float32{1, 2, 3, 4, 5, 6}, 2, 3)
	if err != nil {
		log.Fatal(err)
	}
	put, err := thinker.Put(ctx, "req-7", tensor.Map{
		tensor.Field("hidden", hidden),
		tensor.Field("step", tensor.Int(4)),
	}, stage.PutOptions{})
	if err != nil {
		log.Fatal(err)
	}

	talker, err := connect.Open(ctx, connect.Options{Planes: []string{"mapped", "tcp"}, Bytes: 64 << 20})
	if err != nil {
		log.Fatal(err)
	}
	defer talker.Close(ctx)
	got, err := talker.Get(ctx, stage.Request{Key: "req-7", Metadata: put.Metadata, Wait: true})
	if err != nil {
		log.Fatal(err)
	}
	m := got.Root.(tensor.Map)
	fmt.Println(m.Get("hidden"), m.Get("step"))
	if err := got.Release(); err != nil {
		log.Fatal(err)
	}
	<-put.Released()
	fmt.Println(put.Outcome())
	// Output:
	// torch.float32[2 3] 4
	// read
}
