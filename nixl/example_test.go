package nixl_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/nixl"
)

// One agent reads what another registered, within a deadline. The fake stands for the library; see the example of Load for that.
func Example() {
	text, err := readOnce(nixl.NewFake().Library(), unix.Munmap)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(text)
	// Output: an encoding; consumer says done
}

// Two agents of the real library. It is compiled only: not every machine has NIXL.
func ExampleLoad() {
	library, err := nixl.Load()
	if errors.Is(err, nixl.ErrNotFound) {
		fmt.Println(err) // says what to install
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("NIXL", library.Version, "from", library.Path, "because of", library.Why)
	text, err := readOnce(library, library.Unmap)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(text)
}

// readOnce offers memory by one agent and reads it by another.
func readOnce(library *nixl.Library, unmap func([]byte) error) (string, error) {
	source, err := memory()
	if err != nil {
		return "", err
	}
	destination, err := memory()
	if err != nil {
		return "", err
	}
	copy(source, "an encoding")

	producer, err := newAgent(library, "producer", source)
	if err != nil {
		return "", err
	}
	metadata, err := producer.LocalMetadata() // travels to the consumer by any control plane
	if err != nil {
		return "", err
	}
	consumer, err := newAgent(library, "consumer", destination)
	if err != nil {
		return "", err
	}
	// An agent that is closed reads and writes nothing any more: only then is its memory unmapped.
	defer func() {
		_, _ = consumer.Close(), producer.Close()
		_, _ = unmap(destination), unmap(source)
	}()

	peer, err := consumer.AddPeer(metadata)
	if err != nil {
		return "", err
	}
	request, err := consumer.NewRequest(nixl.Read,
		nixl.Descs{Type: nixl.DRAM, Ranges: []nixl.Range{nixl.RangeOf(destination)}},
		nixl.Descs{Type: nixl.DRAM, Ranges: []nixl.Range{nixl.RangeOf(source)}},
		peer, nixl.RequestOptions{Notification: []byte("done")})
	if err != nil {
		return "", err
	}
	defer request.Release()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	done, err := request.Post()
	if err == nil && !done {
		err = request.Wait(ctx) // with ctx's error the READ goes on, and destination is not ours until the consumer is closed
	}
	if err != nil {
		return "", err
	}

	for ctx.Err() == nil { // nothing tells of a notification
		notifications, err := producer.Notifications()
		if err != nil {
			return "", err
		}
		if len(notifications) > 0 {
			return fmt.Sprintf("%s; %s says %s", destination[:11], notifications[0].Peer, notifications[0].Message), nil
		}
		time.Sleep(100 * time.Microsecond)
	}
	return "", ctx.Err()
}

// memory lies outside of the Go heap.
func memory() ([]byte, error) {
	return unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

func newAgent(library *nixl.Library, name string, memory []byte) (*nixl.Agent, error) {
	a, err := library.NewAgent(name, nixl.AgentConfig{})
	if err != nil {
		return nil, err
	}
	if _, err = a.CreateBackend("UCX", nil); err == nil {
		_, err = a.Register(nixl.DRAM, []nixl.Range{nixl.RangeOf(memory)})
	}
	if err != nil {
		_ = a.Close()
		return nil, err
	}
	return a, nil
}
