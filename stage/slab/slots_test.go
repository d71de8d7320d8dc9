package slab

import (
	"testing"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// A reader that sees the slot table knows whether what it read was the payload's; it does until the memory is free, and no longer.
func TestASlotVouchesForAPayloadUntilItsMemoryIsFree(t *testing.T) {
	dir := transfertest.Dir(t)
	leaks(t, dir)
	producer := newSlab(t, dir, "a", 1<<20, makers[transfer.Mapped](t, dir))
	consumer := newSlab(t, dir, "b", 1<<20, makers[transfer.Mapped](t, dir))
	p := put(t, producer, 9, 5000, 0, 77)
	m, err := offer(t, p, "1", 0, transfer.Mapped)
	must(t, err)
	b, err := consumer.Alloc(patient(t), sizesOf(m.Specs))
	must(t, err)
	defer b.Free()
	read := func() bool {
		t.Helper()
		_, err := consumer.Read(patient(t), m, b)
		must(t, err)
		return b.Vouched()
	}
	if b.Vouched() {
		t.Error("nothing was read")
	}
	if !read() {
		t.Error("of a payload that is there")
	}
	_, _, release, err := consumer.View(patient(t), m)
	must(t, err)
	if !release() {
		t.Error("of a view of a payload that is there")
	}
	_, _, release, err = consumer.View(patient(t), m)
	must(t, err)
	must(t, p.Withdraw(patient(t), "1", true))
	p.Release()
	if release() {
		t.Error("of a view of memory that is free")
	}
	if read() {
		t.Error("of memory that is free")
	}
	next := put(t, producer, 10, 5000, 0, 77) // the same slot and the same place
	if read() {
		t.Error("of memory that is another payload's")
	}
	next.Release()
}

func TestPayloadsWithoutASlotAreNotVouchedFor(t *testing.T) {
	dir := transfertest.Dir(t)
	leaks(t, dir)
	producer := newSlab(t, dir, "a", (maxSlots+2)*blockBytes, makers[transfer.Mapped](t, dir), makers[transfer.TCP](t, dir))
	consumer := newSlab(t, dir, "b", 1<<20, makers[transfer.Mapped](t, dir))
	far := newSlab(t, dir, "c", 1<<20, makers[transfer.TCP](t, dir))
	vouched := func(at *Slab, p *Payload, plane string) bool {
		t.Helper()
		m, err := offer(t, p, "1", 0, plane)
		must(t, err)
		b, err := at.Alloc(patient(t), sizesOf(m.Specs))
		must(t, err)
		defer b.Free()
		_, err = at.Read(patient(t), m, b)
		must(t, err)
		compare(t, b.Slices(), 3)
		must(t, p.Withdraw(patient(t), "1", true))
		return b.Vouched()
	}
	var all []*Payload
	for range maxSlots + 1 {
		all = append(all, put(t, producer, 3, 100))
	}
	if !vouched(consumer, all[maxSlots-1], transfer.Mapped) {
		t.Error("of the last one with a slot")
	}
	if vouched(consumer, all[maxSlots], transfer.Mapped) {
		t.Error("of one too many")
	}
	if !vouched(far, all[maxSlots], transfer.TCP) {
		t.Error("by a token")
	}
	all[0].Release()
	if all[0] = put(t, producer, 3, 100); !vouched(consumer, all[0], transfer.Mapped) {
		t.Error("of one that has a slot again")
	}
	for _, p := range all {
		p.Release()
	}
}
