package fields

import "testing"

func TestFieldsComeBackAndEndWithTheBuffer(t *testing.T) {
	b := AppendString(nil, "abc")
	b = append(b, 1, 2, 3, 4, 5, 6, 7, 8)
	r := NewReader(b)
	if s := r.Str(); s != "abc" {
		t.Errorf("string %q", s)
	}
	if v := r.Uint32(); v != 0x04030201 || r.Len() != 4 {
		t.Errorf("number %#x, %d left", v, r.Len())
	}
	if v := r.Uint64(); v != 0 || r.OK() {
		t.Errorf("a field that is not there: %d, ok %v", v, r.OK())
	}
	if v := r.Uint16(); v != 0 || r.OK() {
		t.Errorf("a field after one that is not there: %d, ok %v", v, r.OK())
	}
	if r := NewReader([]byte{200, 0, 'x'}); r.Str() != "" || r.OK() {
		t.Error("a string longer than the buffer was read")
	}
}
