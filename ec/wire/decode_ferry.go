package wire

import (
	"math"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// ours is true for a `ferry` value that is a map of our version. Anything else there is a plain peer's, or a newer node's, and
// does not count. The value is known to be well formed.
func ours(ferry []byte) bool {
	if len(ferry) == 0 || msgp.NextType(ferry) != msgp.MapType {
		return false
	}
	r := reader{buf: ferry, rest: ferry}
	n, err := r.fields()
	if err != nil {
		return false
	}
	for range n {
		name, err := r.next()
		if err != nil {
			return false
		}
		if string(name) == fieldV {
			v, err := r.int()
			return err == nil && v == ExtensionVersion
		}
		if r.skip() != nil {
			return false
		}
	}
	return false
}

func (r *reader) ferryRequest() (*FerryRequest, error) {
	f := &FerryRequest{V: ExtensionVersion}
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldV:
			err = r.version()
		case fieldNode:
			f.Node, err = r.text(MaxNode)
		case fieldEpoch:
			f.Epoch, err = r.uint(math.MaxUint64)
		case fieldPlanes:
			f.Planes, err = r.planeNames()
		case fieldSum:
			f.Sum, err = r.bool()
		case fieldParts:
			f.Compat, err = r.compat()
		case fieldTry:
			f.Try, err = r.uint(math.MaxUint64)
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (r *reader) planeNames() ([]string, error) {
	n, err := r.array(MaxPlanes, 1)
	if err != nil {
		return nil, err
	}
	names := make([]string, n)
	for i := range names {
		if names[i], err = r.text(MaxPlaneName); err != nil {
			return nil, err
		}
	}
	return names, nil
}

func (r *reader) compat() (c Compat, err error) {
	in := *r
	in.path += fieldParts + "."
	n, err := in.fields()
	if err != nil {
		return Compat{}, err
	}
	for range n {
		name, err := in.next()
		if err != nil {
			return Compat{}, err
		}
		switch string(name) {
		case fieldVLLMVersion:
			c.VLLMVersion, err = in.text(MaxCompatText)
		case fieldModel:
			c.Model, err = in.text(MaxCompatText)
		case fieldDtype:
			c.Dtype, err = in.text(MaxCompatText)
		case fieldBlockBytes:
			c.BlockBytes, err = in.int64(math.MaxInt64)
		default:
			err = in.skip()
		}
		if err != nil {
			return Compat{}, err
		}
	}
	r.rest = in.rest
	return c, nil
}

func (r *reader) ferryAck() (*FerryAck, error) {
	f := &FerryAck{V: ExtensionVersion}
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldV:
			err = r.version()
		case fieldTry:
			f.Try, err = r.uint(math.MaxUint64)
		case fieldNode:
			f.Node, err = r.text(MaxNode)
		case fieldEpoch:
			f.Epoch, err = r.uint(math.MaxUint64)
		case fieldGen:
			f.Gen, err = r.uint(math.MaxUint64)
		case fieldSlot:
			var u uint64
			u, err = r.uint(math.MaxUint32)
			f.Slot = uint32(u)
		case fieldGrant:
			f.Grant, err = r.text(MaxGrant)
		case fieldExtents:
			f.Extents, err = r.extents()
		case fieldRows:
			f.Rows, err = r.int64(math.MaxInt64)
		case fieldBytes:
			f.Bytes, err = r.int64(math.MaxInt64)
		case fieldLease:
			f.LeaseMS, err = r.int64(math.MaxInt64 / int64(time.Millisecond)) // so that it fits a time.Duration
		case fieldSum:
			var u uint64
			u, err = r.uint(math.MaxUint64)
			f.Sum = &u
		case fieldPlanes:
			f.Planes, err = r.planeOffers()
		case fieldLocal:
			f.Local, err = r.text(MaxLocal)
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	return f, nil
}

// extents reads runs of blocks; each has at least one block, and none goes past MaxBlock.
func (r *reader) extents() ([][2]uint32, error) {
	n, err := r.array(MaxExtents, 3)
	if err != nil {
		return nil, err
	}
	runs := make([][2]uint32, n)
	for i := range runs {
		at := *r
		two, err := r.array(2, 1)
		if err != nil {
			return nil, err
		}
		if two != 2 {
			return nil, at.fail(ErrMalformed, "an extent of %d numbers, want start and count", two)
		}
		start, err := r.uint(MaxBlock)
		if err != nil {
			return nil, err
		}
		blocks, err := r.uint(MaxBlock + 1 - start)
		if err != nil {
			return nil, err
		}
		if blocks == 0 {
			return nil, at.fail(ErrMalformed, "an extent of no blocks")
		}
		runs[i] = [2]uint32{uint32(start), uint32(blocks)}
	}
	return runs, nil
}

func (r *reader) planeOffers() ([]PlaneOffer, error) {
	n, err := r.array(MaxPlanes, 1)
	if err != nil {
		return nil, err
	}
	offers := make([]PlaneOffer, n)
	for i := range offers {
		if err := r.planeOffer(&offers[i]); err != nil {
			return nil, err
		}
	}
	return offers, nil
}

func (r *reader) planeOffer(p *PlaneOffer) error {
	in := *r
	in.path += fieldPlanes + "."
	n, err := in.fields()
	if err != nil {
		return err
	}
	var name, metadata, token []byte
	for range n {
		field, err := in.next()
		if err != nil {
			return err
		}
		switch string(field) {
		case fieldName:
			name, err = in.str(MaxPlaneName)
		case fieldMetadata:
			metadata, err = in.bin(MaxPlaneMetadata)
		case fieldToken:
			token, err = in.bin(MaxToken)
		default:
			err = in.skip()
		}
		if err != nil {
			return err
		}
	}
	if name == nil {
		return in.fail(ErrMalformed, "%s is missing", fieldName)
	}
	p.Name, p.Metadata, p.Token = string(name), copied(metadata), copied(token)
	r.rest = in.rest
	return nil
}
