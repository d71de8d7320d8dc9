package wire

import (
	"bytes"
	"errors"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
)

func TestPartsAreTheObjectWithoutACopyOfItsTensors(t *testing.T) {
	large := make([]uint8, partMin)
	for i := range large {
		large[i] = uint8(i)
	}
	big := must(tensor.Of(large, partMin))(t)
	small := must(tensor.Of(large[:partMin-1], partMin-1))(t)
	for name, n := range map[string]tensor.Node{
		"a scalar":          num(1),
		"a small tensor":    small,
		"a large tensor":    big,
		"large ones inside": dict{field("a", list{big, num(1), small, big}), field("b", tensor.NDArray{DType: "|u1", Shape: tensor.Shape{partMin}, Data: large})},
		"an image":          tensor.Image{Mode: "L", Shape: tensor.Shape{128, partMin / 128}, Data: large},
	} {
		parts, size, err := ObjectParts(n, ObjectOptions{})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := bytes.Join(parts, nil)
		if !bytes.Equal(got, encode(t, n)) || size != int64(len(got)) {
			t.Errorf("%s: the parts are not the object; size %d of %d", name, size, len(got))
		}
		copied := int64(0)
		for _, p := range parts {
			if len(p) != partMin || &p[0] != &large[0] {
				copied += int64(len(p))
			}
		}
		if copied >= 2*partMin {
			t.Errorf("%s: %d bytes were copied", name, copied)
		}
	}
	if parts, _, err := ObjectParts(dict{field(markTensor, num(1))}, ObjectOptions{}); !errors.Is(err, ErrMarker) || parts != nil {
		t.Errorf("%v, %v", parts, err)
	}
}
