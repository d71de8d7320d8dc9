package tensor

import (
	"fmt"
	"strconv"
	"strings"
)

// Device says where a tensor's bytes are. The zero Device is the CPU.
type Device struct {
	Kind  string // "cuda", "npu", ..; "" is the CPU
	Index int    // of the device among its kind; -1 if the name has none
}

// ParseDevice takes a device as torch prints it: "cpu", "cuda:0", "cuda". The error wraps ErrDevice.
func ParseDevice(name string) (Device, error) {
	kind, index, numbered := strings.Cut(name, ":")
	bad := kind == "" || len(kind) > 16
	for _, c := range kind {
		bad = bad || c != '_' && (c < 'a' || c > 'z')
	}
	n := -1
	if numbered {
		var err error
		n, err = strconv.Atoi(index)
		bad = bad || err != nil || n < 0 || n > 1<<15 || strconv.Itoa(n) != index
	}
	if bad {
		return Device{}, fmt.Errorf("%w: %.64q; give one such as cpu or cuda:0", ErrDevice, name)
	}
	if kind == "cpu" {
		return Device{}, nil
	}
	return Device{kind, n}, nil
}

// CPU is true for this machine's memory.
func (d Device) CPU() bool { return d.Kind == "" }

// String is the name as torch prints it.
func (d Device) String() string {
	switch {
	case d.CPU():
		return "cpu"
	case d.Index < 0:
		return d.Kind
	}
	return d.Kind + ":" + strconv.Itoa(d.Index)
}
