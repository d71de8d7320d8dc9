package main

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/tensor"
)

const (
	kib = 1 << 10
	mib = 1 << 20

	pageBytes = 4096
)

// load is what is put: one tensor, or a map of some leaves. omni_end.py makes the same.
type load struct {
	Bytes  int64 `json:"bytes"` // of each tensor
	Leaves int   `json:"leaves"`
}

func (l load) String() string {
	if l.Leaves > 0 {
		return fmt.Sprintf("%d leaves of %s", l.Leaves, measure.Size(l.Bytes))
	}
	return measure.Size(l.Bytes)
}

func (l load) total() int64 { return l.Bytes * int64(max(l.Leaves, 1)) }

func (l load) value() (tensor.Node, error) {
	leaf := func(i int) (tensor.Tensor, error) {
		b := make([]byte, 0, l.Bytes)
		for k := range l.Bytes / 4 {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(int64(i)+k)))
		}
		return tensor.New(tensor.Float32, tensor.Shape{l.Bytes / 4}, b)
	}
	if l.Leaves == 0 {
		return leaf(0)
	}
	var layers tensor.List
	for i := range l.Leaves {
		t, err := leaf(i)
		if err != nil {
			return nil, err
		}
		layers = append(layers, t)
	}
	return tensor.Map{
		{Key: tensor.String("layers"), Value: layers},
		{Key: tensor.String("meta"), Value: tensor.Map{{Key: tensor.String("finished"), Value: tensor.Flag(true)}}},
	}, nil
}
