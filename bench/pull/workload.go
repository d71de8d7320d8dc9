package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/ec"
)

// A block is one row of the language model's embedding. Every size here is a number of whole ones.
const (
	hidden   = 4096
	rowBytes = 2 * hidden
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

// workload is entries that are pulled at once.
type workload struct {
	count int
	bytes int64 // of each
}

func (w workload) total() int64 { return int64(w.count) * w.bytes }

func (w workload) String() string {
	if w.count == 1 {
		return measure.Size(w.bytes)
	}
	return fmt.Sprintf("%d x %s", w.count, measure.Size(w.bytes))
}

func (w workload) keys() []string {
	keys := make([]string, w.count)
	for i := range keys {
		sum := sha256.Sum256(fmt.Appendf(nil, "pull-%d-%d-%d", w.count, w.bytes, i))
		keys[i] = hex.EncodeToString(sum[:])
	}
	return keys
}

func (w workload) spec() ec.Spec {
	return ec.Spec{Dtype: "torch.bfloat16", Shape: []int64{w.bytes / rowBytes, hidden}, Bytes: w.bytes}
}

// stage is workloads that share one set of processes, whose pools have so many bytes. vLLM's answers describe every block of its
// pool, so that a larger pool would make it slower.
type stage struct {
	region int64
	loads  []workload
}

var stages = []stage{
	{130 * mib, []workload{{1, 64 * kib}, {1, mib}, {1, 16 * mib}, {1, 64 * mib}}},
	{272 * mib, []workload{{1, 256 * mib}}},
	{420 * mib, []workload{{200, 2 * mib}}},
}

// pattern is the bytes of an entry, as interop/peers/vllm/ec_common.py has them.
func pattern(key string, n int64) []byte {
	sum := sha256.Sum256([]byte(key))
	seed := binary.LittleEndian.Uint64(sum[:])
	b := make([]byte, n)
	for i := int64(0); i < n; i += 8 {
		z := uint64(i/8+1)*0x9E3779B97F4A7C15 + seed
		z ^= z >> 30
		z *= 0xBF58476D1CE4E5B9
		z ^= z >> 27
		z *= 0x94D049BB133111EB
		z ^= z >> 31
		binary.LittleEndian.PutUint64(b[i:], z)
	}
	return b
}
