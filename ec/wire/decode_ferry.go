package wire

import (
	"math"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// ferry takes the value of a `ferry` field aside, which is read if it is ours.
func (r *reader) ferry() reader { return reader{r.Raw(fieldFerry + ".")} }

// ours is true for a `ferry` value that is a map of our version. Anything else there is a plain peer's, or a newer node's, and
// does not count. The value is known to be well formed.
func (r reader) ours() bool {
	if r.Type() != msgp.MapType {
		return false
	}
	for name := range r.Fields() {
		if string(name) == fieldV {
			return r.integer() == ExtensionVersion
		}
		r.Skip()
	}
	return false
}

func (r *reader) ferryRequest() *FerryRequest {
	f := &FerryRequest{V: ExtensionVersion}
	for name := range r.Fields() {
		switch string(name) {
		case fieldV:
			r.version()
		case fieldNode:
			f.Node = r.Text(MaxNode)
		case fieldEpoch:
			f.Epoch = r.Uint(math.MaxUint64)
		case fieldPlanes:
			f.Planes = r.planeNames()
		case fieldSum:
			f.Sum = r.Bool()
		case fieldParts:
			f.Compat = r.compat()
		case fieldTry:
			f.Try = r.Uint(math.MaxUint64)
		default:
			r.Skip()
		}
	}
	return f
}

func (r *reader) planeNames() []string {
	names := make([]string, r.Array(MaxPlanes, 1))
	for i := range names {
		names[i] = r.Text(MaxPlaneName)
	}
	return names
}

func (r *reader) compat() (c Compat) {
	outer := r.Enter(fieldParts + ".")
	for name := range r.Fields() {
		switch string(name) {
		case fieldVLLMVersion:
			c.VLLMVersion = r.Text(MaxCompatText)
		case fieldModel:
			c.Model = r.Text(MaxCompatText)
		case fieldDtype:
			c.Dtype = r.Text(MaxCompatText)
		case fieldBlockBytes:
			c.BlockBytes = r.Size(math.MaxInt64)
		default:
			r.Skip()
		}
	}
	r.Leave(outer)
	return c
}

func (r *reader) ferryAck() *FerryAck {
	f := &FerryAck{V: ExtensionVersion}
	for name := range r.Fields() {
		switch string(name) {
		case fieldV:
			r.version()
		case fieldTry:
			f.Try = r.Uint(math.MaxUint64)
		case fieldNode:
			f.Node = r.Text(MaxNode)
		case fieldEpoch:
			f.Epoch = r.Uint(math.MaxUint64)
		case fieldGen:
			f.Gen = r.Uint(math.MaxUint64)
		case fieldSlot:
			f.Slot = uint32(r.Uint(math.MaxUint32))
		case fieldGrant:
			f.Grant = r.Text(MaxGrant)
		case fieldExtents:
			f.Extents = r.extents()
		case fieldRows:
			f.Rows = r.Size(math.MaxInt64)
		case fieldBytes:
			f.Bytes = r.Size(math.MaxInt64)
		case fieldLease:
			f.LeaseMS = r.Size(math.MaxInt64 / int64(time.Millisecond)) // so that it fits a time.Duration
		case fieldSum:
			u := r.Uint(math.MaxUint64)
			f.Sum = &u
		case fieldPlanes:
			f.Planes = r.planeOffers()
		case fieldLocal:
			f.Local = r.Text(MaxLocal)
		default:
			r.Skip()
		}
	}
	return f
}

// extents reads runs of blocks; each has at least one block, and none goes past MaxBlock.
func (r *reader) extents() [][2]uint32 {
	runs := make([][2]uint32, r.Array(MaxExtents, 3))
	for i := range runs {
		at := r.Offset()
		r.tuple(2, "an extent of %d numbers, want start and count")
		start := r.Uint(MaxBlock)
		blocks := r.Uint(MaxBlock + 1 - start)
		if blocks == 0 {
			r.FailAt(at, ErrMalformed, "an extent of no blocks")
		}
		runs[i] = [2]uint32{uint32(start), uint32(blocks)}
	}
	return runs
}

func (r *reader) planeOffers() []PlaneOffer {
	offers := make([]PlaneOffer, r.Array(MaxPlanes, 1))
	for i := range offers {
		offers[i] = r.planeOffer()
	}
	return offers
}

func (r *reader) planeOffer() PlaneOffer {
	outer := r.Enter(fieldPlanes + ".")
	var name, metadata, token []byte
	for field := range r.Fields() {
		switch string(field) {
		case fieldName:
			name = r.Str(MaxPlaneName)
		case fieldMetadata:
			metadata = r.Bin(MaxPlaneMetadata)
		case fieldToken:
			token = r.Bin(MaxToken)
		default:
			r.Skip()
		}
	}
	if name == nil {
		r.Fail(ErrMalformed, "%s is missing", fieldName)
	}
	r.Leave(outer)
	return PlaneOffer{Name: string(name), Metadata: copied(metadata), Token: copied(token)}
}
