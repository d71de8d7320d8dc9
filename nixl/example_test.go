package nixl_test

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/nixl"
)

// One agent reads what another registered. With the real library, Load takes the place of NewFake().Library().
func Example() {
	library := nixl.NewFake().Library()

	source, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	check(err)
	destination, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	check(err)
	copy(source, "an encoding")

	producer := agent(library, "producer", source)
	defer producer.Close()
	metadata, err := producer.LocalMetadata() // travels to the consumer by any control plane
	check(err)

	consumer := agent(library, "consumer", destination)
	defer consumer.Close()
	peer, err := consumer.AddPeer(metadata)
	check(err)
	request, err := consumer.NewRequest(nixl.Read,
		nixl.Descs{Type: nixl.DRAM, Ranges: []nixl.Range{nixl.RangeOf(destination)}},
		nixl.Descs{Type: nixl.DRAM, Ranges: []nixl.Range{nixl.RangeOf(source)}},
		peer, nixl.RequestOptions{Notification: []byte("done")})
	check(err)
	defer request.Release()
	_, err = request.Post()
	check(err)
	check(request.Wait(context.Background()))

	notifications, err := producer.Notifications()
	check(err)
	fmt.Printf("%s; %s says %s\n", destination[:11], notifications[0].Peer, notifications[0].Message)
	// Output: an encoding; consumer says done
}

func agent(library *nixl.Library, name string, memory []byte) *nixl.Agent {
	a, err := library.NewAgent(name, nixl.AgentConfig{})
	check(err)
	_, err = a.CreateBackend("UCX", nil)
	check(err)
	_, err = a.Register(nixl.DRAM, []nixl.Range{nixl.RangeOf(memory)})
	check(err)
	return a
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
