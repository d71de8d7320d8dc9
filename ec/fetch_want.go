package ec

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
)

// wanted is an announcement that was found good.
type wanted struct {
	key    string
	spec   Spec
	blocks int64
	host   string
	addr   string  // host:port
	slot   *uint32 // in the producer's table; nil: not said
}

// wanted checks a key and its announcement before anything is allocated or dialled.
//
// Generation 1 announces no shape. One block is then one row: the peers' block is the width of the language model's embedding
// times the bytes of an element, and in that generation an encoding has this width.
func (c *Consumer) wanted(key string, a *Announcement) (wanted, error) {
	w := wanted{key: key, host: a.PeerHost, slot: a.Slot}
	if err := checkKey(key); err != nil {
		return w, err
	}
	if a.PeerHost == "" && a.PeerPort == 0 {
		return w, fmt.Errorf("%w: %q is not in the pool and its announcement has no address", ErrMissing, key)
	}
	if err := checkHost(a.PeerHost); err != nil {
		return w, err
	}
	if a.PeerPort < 1 || a.PeerPort > math.MaxUint16 {
		return w, fmt.Errorf("%w: announced port %d; want 1 to 65535", ErrSpec, a.PeerPort)
	}
	w.addr = net.JoinHostPort(a.PeerHost, strconv.Itoa(a.PeerPort))

	block, item := c.o.Compat.BlockBytes, int64(c.o.ItemSize)
	if a.SizeBytes <= 0 || a.SizeBytes%block != 0 {
		return w, fmt.Errorf("%w: announced size %d is not a number of whole blocks of %d bytes", ErrSpec, a.SizeBytes, block)
	}
	w.blocks = a.SizeBytes / block
	w.spec = Spec{Dtype: c.o.Compat.Dtype, Shape: []int64{w.blocks, block / item}, Bytes: a.SizeBytes}
	if a.Shape != nil {
		if len(a.Shape) != 2 || a.Shape[0] <= 0 || a.Shape[1] <= 0 {
			return w, fmt.Errorf("%w: announced shape %v; want [rows, width], both above 0", ErrSpec, a.Shape)
		}
		rows, width := int64(a.Shape[0]), int64(a.Shape[1])
		if rows > a.SizeBytes/item || width > a.SizeBytes/item/rows {
			return w, fmt.Errorf("%w: announced shape %v of %d-byte elements does not fit the announced size %d", ErrSpec, a.Shape, item, a.SizeBytes)
		}
		w.spec.Shape = []int64{rows, width}
		w.spec.Bytes = rows * width * item
		if blocksOf(w.spec.Bytes, block) != w.blocks {
			return w, fmt.Errorf("%w: announced shape %v takes %d blocks, the announced size %d is %d", ErrSpec, a.Shape,
				blocksOf(w.spec.Bytes, block), a.SizeBytes, w.blocks)
		}
	}
	if w.blocks > c.blocks {
		return w, fmt.Errorf("%w: %q has %d blocks, the pool %d; give the node more ec_cpu_bytes", ErrTooLarge, key, w.blocks, c.blocks)
	}
	if c.o.AllowHost != nil {
		if err := c.o.AllowHost(a.PeerHost); err != nil {
			return w, fmt.Errorf("ec: announced host %q: %w", a.PeerHost, err)
		}
	}
	return w, nil
}

func blocksOf(bytes, block int64) int64 { return (bytes + block - 1) / block }

// fits tells whether an entry of the pool can be what was announced. What the announcement leaves out is not compared.
func (c *Consumer) fits(a *Announcement, s Spec) bool {
	if a.Shape != nil && !slices.EqualFunc(a.Shape, s.Shape, func(x int, y int64) bool { return int64(x) == y }) {
		return false
	}
	block := c.o.Compat.BlockBytes
	return a.SizeBytes == 0 || a.SizeBytes == blocksOf(s.Bytes, block)*block
}

// checkHost takes an IP address that one host can have, or a name of letters, digits, '.', '-' and '_'.
func checkHost(host string) error {
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.IsUnspecified() || ip.IsMulticast() {
			return fmt.Errorf("%w: announced host %s is not the address of a host; set advertise_host on the producer's node", ErrSpec, host)
		}
		return nil
	}
	ok := host != "" && len(host) <= 253
	for i := 0; ok && i < len(host); i++ {
		b := host[i]
		ok = b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '.' || b == '-' || b == '_'
	}
	if !ok || host[0] == '-' || host[0] == '.' {
		return fmt.Errorf("%w: announced host %.64q is neither an address nor a host's name", ErrSpec, host)
	}
	return nil
}
