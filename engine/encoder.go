package engine

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
)

// Mean and deviation of the three channels, as CLIP-like processors use them (image_mean, image_std).
var (
	channelMean = [3]float32{0.48145466, 0.4578275, 0.40821073}
	channelStd  = [3]float32{0.26862954, 0.26130258, 0.27577711}
)

const (
	tileRows = 2 // rows and columns of the inner product's tile: its 8 sums and 6 operands stay in registers
	tileCols = 4
)

// encoder turns pixels into encodings: row r of an encoding is the vector of merged patch r times a matrix of dummy weights.
// It is a pure function of the model's name, the width and the pixels, so two engines can be compared byte for byte. It is safe
// for concurrent use.
type encoder struct {
	width   int
	weights [][tileCols]float32 // [column tile][input]
	pixel   [3][256]float32     // channel and byte to input
	workers int
}

// newEncoder makes the weights: uniform, with the deviation that keeps an input's variance in the output.
func newEncoder(model string, width int) *encoder {
	tiles := (width + tileCols - 1) / tileCols
	e := &encoder{width: width, weights: make([][tileCols]float32, tiles*rowInputs), workers: runtime.GOMAXPROCS(0)}
	for c := range e.pixel {
		for v := range e.pixel[c] {
			e.pixel[c][v] = (float32(v)/255 - channelMean[c]) / channelStd[c]
		}
	}
	seed := sha256.Sum256(fmt.Appendf(nil, "dummy weights\x00%s\x00%d", model, width))
	scale := float32(2 * math.Sqrt(3.0/rowInputs))
	var wg sync.WaitGroup
	for w := range e.workers {
		wg.Go(func() {
			for t := w; t < tiles; t += e.workers {
				// A stream a tile, so that the weights do not depend on the number of workers.
				rng := rand.NewPCG(binary.LittleEndian.Uint64(seed[:])+uint64(t), binary.LittleEndian.Uint64(seed[8:]))
				for i := range rowInputs {
					for c := range tileCols {
						unit := float32(rng.Uint64()>>40) / (1 << 24) // [0, 1), exact
						e.weights[t*rowInputs+i][c] = (unit - 0.5) * scale
					}
				}
			}
		})
	}
	wg.Wait()
	return e
}

// rowBytes is the size of one row: bfloat16.
func (e *encoder) rowBytes() int { return 2 * e.width }

// embed writes the encoding of px into dst: rows in order, each of width bfloat16 numbers, little endian, whole rows in each
// slice. The bytes go where dst points, once; nothing is copied afterwards.
func (e *encoder) embed(px *pixels, dst [][]byte) error {
	var rows [][]byte
	for _, b := range dst {
		if len(b)%e.rowBytes() != 0 {
			return fmt.Errorf("engine: a buffer of %d bytes is not whole rows of %d bytes", len(b), e.rowBytes())
		}
		for ; len(b) > 0; b = b[e.rowBytes():] {
			rows = append(rows, b[:e.rowBytes():e.rowBytes()])
		}
	}
	if n := px.grid.Rows(); len(rows) != n {
		return fmt.Errorf("engine: room for %d rows, the image has %d", len(rows), n)
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(e.workers, (len(rows)+tileRows-1)/tileRows) {
		wg.Go(func() {
			in := make([][tileRows]float32, rowInputs)
			for {
				r := int(next.Add(tileRows)) - tileRows
				if r >= len(rows) {
					return
				}
				for i := range tileRows {
					// The last tile of an odd number of rows computes its row twice and stores it once.
					e.gather(px, min(r+i, len(rows)-1), i, in)
				}
				e.multiply(in, rows[r:min(r+tileRows, len(rows))])
			}
		})
	}
	wg.Wait()
	return nil
}

// gather makes merged patch row the inputs of lane i.
func (e *encoder) gather(px *pixels, row, i int, in [][tileRows]float32) {
	across := px.grid[2] / mergeSide
	x, y := row%across*factor, row/across*factor
	k := 0
	for line := range factor {
		p := px.rgba.Pix[px.rgba.PixOffset(x, y+line):]
		for q := 0; q < 4*factor; q += 4 {
			in[k][i] = e.pixel[0][p[q]]
			in[k+1][i] = e.pixel[1][p[q+1]]
			in[k+2][i] = e.pixel[2][p[q+2]]
			k += 3
		}
	}
}

// multiply stores the product of the lanes of in with the weights into rows (one a lane).
func (e *encoder) multiply(in [][tileRows]float32, rows [][]byte) {
	for col := 0; col < e.width; col += tileCols {
		sums := tile(in, e.weights[col/tileCols*rowInputs:])
		for i, row := range rows {
			for c := col; c < min(col+tileCols, e.width); c++ {
				binary.LittleEndian.PutUint16(row[2*c:], bfloat16(sums[i*tileCols+c-col]))
			}
		}
	}
}

// tile sums in a fixed order. The conversions keep the compiler from fusing multiply and add, which would give other bits on
// other machines.
func tile(in [][tileRows]float32, w [][tileCols]float32) [tileRows * tileCols]float32 {
	w = w[:len(in)]
	var s0, s1, s2, s3, s4, s5, s6, s7 float32
	for k := range in {
		a, b := &in[k], &w[k]
		b0, b1, b2, b3 := b[0], b[1], b[2], b[3]
		x := a[0]
		s0 += float32(x * b0)
		s1 += float32(x * b1)
		s2 += float32(x * b2)
		s3 += float32(x * b3)
		x = a[1]
		s4 += float32(x * b0)
		s5 += float32(x * b1)
		s6 += float32(x * b2)
		s7 += float32(x * b3)
	}
	return [...]float32{s0, s1, s2, s3, s4, s5, s6, s7}
}

// bfloat16 rounds to nearest, ties to even. x is finite: inputs and weights are bounded.
func bfloat16(x float32) uint16 {
	b := math.Float32bits(x)
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}
