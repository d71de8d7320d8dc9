package nixl

import (
	"errors"
	"fmt"
)

// Status is a NIXL status code. Negative values are errors and implement error.
type Status int32

// Status codes of the C ABI (nixl_capi_status_t).
const (
	StatusSuccess      Status = 0
	StatusInProgress   Status = 1
	StatusInvalidParam Status = -1
	StatusBackend      Status = -2 // 1.3 folds nearly every failure into this one; the detail goes to stderr only
	StatusInvalidState Status = -3
	StatusException    Status = -4
	StatusNoTelemetry  Status = -5
	StatusNotFound     Status = -6 // since 1.4

	statusMissing Status = -1 << 31 // ours: the library has no such call
)

var statusText = map[Status]string{
	StatusSuccess:      "success",
	StatusInProgress:   "in progress",
	StatusInvalidParam: "invalid parameter",
	StatusBackend:      "backend error",
	StatusInvalidState: "invalid state",
	StatusException:    "exception in the library",
	StatusNoTelemetry:  "no telemetry",
	StatusNotFound:     "not found",
}

// Error implements error.
func (s Status) Error() string {
	if text, ok := statusText[s]; ok {
		return "nixl: " + text
	}
	return fmt.Sprintf("nixl: status %d", int32(s))
}

// err gives nil for success, else the operation with the status.
func (s Status) err(operation string) error {
	if s == StatusSuccess {
		return nil
	}
	if s == statusMissing {
		return fmt.Errorf("%s: %w", operation, ErrUnsupported)
	}
	return fmt.Errorf("%s: %w", operation, s)
}

// Errors of this package, beside Status.
var (
	// ErrClosed: the agent, registration, peer or request is closed or released.
	ErrClosed = errors.New("nixl: closed")
	// ErrStalePeer: what this Peer stood for is over, since it was added again under its name (it restarted), or was lost when newer
	// metadata of it could not be loaded; or a request or list was made before the library had to forget and reload the peer: make it anew.
	ErrStalePeer = errors.New("nixl: the peer was replaced or reloaded since")
	// ErrNotFound: no libnixl_capi on this machine.
	ErrNotFound = errors.New("nixl: libnixl_capi.so not found")
	// ErrUnsupported: the library lacks a symbol.
	ErrUnsupported = errors.New("nixl: not supported by this library")
	// ErrBadArgument: refused before it reached the library.
	ErrBadArgument = errors.New("nixl: bad argument")
)
