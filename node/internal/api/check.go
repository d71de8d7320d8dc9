package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/region"
)

// Check looks at what can be told wrong about an operation without asking the pool. The client calls it before it sends and the
// node before it acts, so a caller's slip costs that operation and never the connection. Errors wrap ec.ErrKey, ec.ErrSpec,
// ErrBadRequest or ErrLimit.
func (o *Op) Check() error {
	switch o.Kind {
	case OpReserve, OpAnnounce, OpFetch, OpMap, OpLookup, OpWait, OpRemove, OpResume, OpRepin:
		if err := checkKey(o.Key); err != nil {
			return err
		}
	case OpCommit, OpDiscard, OpRelease:
		if o.Handle == 0 {
			return fmt.Errorf("%w: %s needs a handle", ErrBadRequest, o.Kind)
		}
	}
	switch o.Kind {
	case OpReserve:
		return o.checkSpec()
	case OpAnnounce:
		return o.checkAnnounce()
	case OpFetch:
		if len(o.Entry) == 0 {
			return fmt.Errorf("%w: fetch needs the key's entry of ec_transfer_params", ErrBadRequest)
		}
		if len(o.Entry) > MaxEntry {
			return fmt.Errorf("%w: an entry of %d bytes, at most %d", ErrLimit, len(o.Entry), MaxEntry)
		}
	}
	switch o.Kind {
	case OpFetch, OpWait, OpList, OpCancel:
		if o.Ref == 0 {
			return fmt.Errorf("%w: %s needs a ref", ErrBadRequest, o.Kind)
		}
		if o.TimeoutMS < 0 {
			return fmt.Errorf("%w: timeout_ms %d is negative", ErrBadRequest, o.TimeoutMS)
		}
	}
	return nil
}

func checkKey(key string) error {
	switch {
	case key == "":
		return fmt.Errorf("%w: empty", ec.ErrKey)
	case len(key) > region.MaxKey:
		return fmt.Errorf("%w: %d bytes, at most %d", ec.ErrKey, len(key), region.MaxKey)
	case !utf8.ValidString(key) || strings.ContainsRune(key, 0):
		return fmt.Errorf("%w: %q is not text", ec.ErrKey, key)
	}
	return nil
}

// checkSpec looks at what the protocol bounds; what the pool allows, the cache says.
func (o *Op) checkSpec() error {
	switch {
	case o.Dtype == "" || len(o.Dtype) > region.MaxDtype || !utf8.ValidString(o.Dtype):
		return fmt.Errorf("%w: dtype %.32q, a name of 1 to %d bytes as torch prints it", ec.ErrSpec, o.Dtype, region.MaxDtype)
	case len(o.Shape) == 0 || len(o.Shape) > region.MaxDims:
		return fmt.Errorf("%w: a shape of %d dimensions, 1 to %d", ec.ErrSpec, len(o.Shape), region.MaxDims)
	}
	return nil
}

func (o *Op) checkAnnounce() error {
	if len(o.Metadata) > MaxMetadata {
		return fmt.Errorf("%w: metadata of %d bytes, at most %d", ErrLimit, len(o.Metadata), MaxMetadata)
	}
	if len(o.Metadata) > 0 && !(bytes.HasPrefix(bytes.TrimLeft(o.Metadata, " \t\r\n"), []byte("{")) && json.Valid(o.Metadata)) {
		return fmt.Errorf("%w: metadata is not a JSON object", ErrBadRequest)
	}
	if len(o.ItemIndices) > MaxItemIndices {
		return fmt.Errorf("%w: %d item_indices, at most %d", ErrLimit, len(o.ItemIndices), MaxItemIndices)
	}
	for _, i := range o.ItemIndices {
		if i < 0 {
			return fmt.Errorf("%w: item_indices %d is negative", ErrBadRequest, i)
		}
	}
	return nil
}
