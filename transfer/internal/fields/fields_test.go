package fields

import (
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/transfer"
)

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

func TestMetadataOfAnotherPlaneOrVersionIsNotOpened(t *testing.T) {
	for _, c := range []struct {
		b    []byte
		says string
	}{
		{[]byte("FABC\x02\x00x"), ""},
		{[]byte("FXYZ\x02\x00x"), "not of this plane"},
		{[]byte("FAB"), "not of this plane"},
		{nil, "not of this plane"},
		{[]byte("FABC\x03\x00x"), "version 3, 2 is known"},
		{[]byte("FABC\x02"), "version 0, 2 is known"},
		{make([]byte, transfer.MaxMetadata+1), fmt.Sprintf("%d bytes, at most %d", transfer.MaxMetadata+1, transfer.MaxMetadata)},
	} {
		r, err := Open(c.b, "FABC", 2)
		switch {
		case c.says != "":
			if err == nil || err.Error() != c.says {
				t.Errorf("%.8q: %v, want %s", c.b, err, c.says)
			}
		case err != nil || r.Len() != 1:
			t.Errorf("%.8q: %v", c.b, err)
		}
	}
}
