package wire

import (
	"github.com/tensorferry/tensorferry/tensor"
)

// Keys by which the peers' serializer marks what msgpack does not have. A map with one of the first three that is true is a tensor,
// an array or an image; in a skeleton, a map of just one of the last two is a leaf or a tuple.
const (
	markTensor = "__tensor__"
	markArray  = "__ndarray__"
	markImage  = "__pil_image__"
	markLeaf   = "__nixl_tensor_index__"
	markTuple  = "__nixl_tuple__"

	fieldMode = "mode"
	fieldData = "data"
)

// peerObjects are the keys by which the peers' reader takes a map for one of their objects; all of a row must be there.
var peerObjects = [...]struct {
	object string
	keys   []string
}{
	{"OmniRequestOutput", []string{"finished", "final_output_type"}},
	{"OmniRequestOutput", []string{"finished", "images"}},
	{"RequestOutput", []string{"request_id", "prompt", "prompt_token_ids", "outputs", "finished"}},
	{"CompletionOutput", []string{"index", "text", "token_ids", "finish_reason"}},
}

// truth is Python's of a value that came out of msgpack.
func truth(n tensor.Node) bool {
	switch n := n.(type) {
	case nil, tensor.Null:
		return false
	case tensor.Flag:
		return bool(n)
	case tensor.Int:
		return n != 0
	case tensor.Uint:
		return n != 0
	case tensor.Float:
		return n != 0
	case tensor.String:
		return n != ""
	case tensor.Bytes:
		return len(n) > 0
	case tensor.List:
		return len(n) > 0
	case tensor.Tuple:
		return len(n) > 0
	case tensor.Map:
		return len(n) > 0
	}
	return true // tensors, arrays and images are maps that are not empty
}

// marked gives the marker that makes m something else, "" if none does.
func marked(m tensor.Map) string {
	mark := ""
	for _, e := range m {
		switch k, _ := e.Key.(tensor.String); string(k) {
		case markTensor:
			if truth(e.Value) {
				return markTensor
			}
		case markArray:
			if truth(e.Value) {
				mark = markArray
			}
		case markImage:
			if mark == "" && truth(e.Value) {
				mark = markImage
			}
		}
	}
	return mark
}

// peerObject gives the name of the object that a plain reader makes of m, "" if it stays a map.
func peerObject(m tensor.Map) string {
	for _, o := range peerObjects {
		all := len(m) >= len(o.keys)
		for _, k := range o.keys {
			all = all && m.Get(k) != nil
		}
		if all {
			return o.object
		}
	}
	return ""
}
