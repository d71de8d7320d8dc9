package chaos

import (
	"strings"
	"testing"
)

func TestEveryByteOfAnEntryIsChecked(t *testing.T) {
	key := keyName(3)
	n := int(specOf(key).Bytes)
	whole := make([]byte, n)
	fill(whole, key, 0)
	for _, cut := range []int{0, 1, 7, 8, blockBytes, n - 1} {
		pieces := [][]byte{append([]byte(nil), whole[:cut]...), append([]byte(nil), whole[cut:]...)}
		if err := check(pieces, key); err != nil {
			t.Errorf("cut at %d: %v", cut, err)
		}
		again := [][]byte{make([]byte, cut), make([]byte, n-cut)}
		fillAll(again, key)
		if err := check(again, key); err != nil {
			t.Errorf("filled in two, cut at %d: %v", cut, err)
		}
	}
	for _, i := range []int{0, 1, 8, 4095, blockBytes, n - 2, n - 1} {
		whole[i] ^= 1
		if got := wrong(whole, key, 0); got != i {
			t.Errorf("byte %d is wrong, found %d", i, got)
		}
		whole[i] ^= 1
	}
	if err := check([][]byte{whole[:n-1]}, key); err == nil {
		t.Error("a short entry passes")
	}
	other := make([]byte, n)
	fill(other, keyName(5), 0)
	if err := check([][]byte{other}, key); err == nil || !strings.Contains(err.Error(), keyName(5)) {
		t.Errorf("another's bytes: %v", err)
	}
}
