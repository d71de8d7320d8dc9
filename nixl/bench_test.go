package nixl

import "testing"

// BenchmarkRead is a READ of 4 KiB between two agents of this process: of a request that is posted again and again, and with its making.
func BenchmarkRead(b *testing.B) {
	l := realLibrary(b)
	agent := func(name string, memory []byte) *Agent {
		a, err := l.NewAgent(uniqueName(name), AgentConfig{})
		must(b, err)
		b.Cleanup(func() { must(b, a.Close()) })
		_, err = a.CreateBackend("UCX", nil)
		must(b, err)
		_, err = a.Register(DRAM, []Range{RangeOf(memory)})
		must(b, err)
		return a
	}
	source, destination := mapped(b, 4096), mapped(b, 4096)
	producer, consumer := agent("bench-producer", source), agent("bench-consumer", destination)
	peer := add(b, consumer, producer)
	request := func() *Request {
		r, err := consumer.NewRequest(Read, Descs{DRAM, []Range{RangeOf(destination)}}, Descs{DRAM, []Range{RangeOf(source)}}, peer, RequestOptions{})
		must(b, err)
		return r
	}
	move := func(r *Request) {
		done, err := r.Post()
		if err == nil && !done {
			err = r.Wait(b.Context())
		}
		must(b, err)
	}
	b.Run("posted", func(b *testing.B) {
		r := request()
		defer r.Release()
		b.ReportAllocs()
		for b.Loop() {
			move(r)
		}
	})
	b.Run("made", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			r := request()
			move(r)
			r.Release()
		}
	})
	b.Run("status", func(b *testing.B) {
		r := request()
		defer r.Release()
		move(r)
		for b.Loop() {
			if _, err := r.Status(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
