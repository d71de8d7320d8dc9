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
	return fmt.Errorf("%s: %w", operation, s)
}

// Errors of this package, beside Status.
var (
	// ErrClosed: the agent, registration, peer or request is closed or released.
	ErrClosed = errors.New("nixl: closed")
	// ErrStalePeer: the peer was added again under its name (it restarted), so this one is over.
	ErrStalePeer = errors.New("nixl: the peer was replaced by a newer one of the same name")
	// ErrNotFound: no libnixl_capi on this machine.
	ErrNotFound = errors.New("nixl: libnixl_capi.so not found")
	// ErrUnsupported: the library lacks a symbol.
	ErrUnsupported = errors.New("nixl: not supported by this library")
	// ErrBadArgument: refused before it reached the library.
	ErrBadArgument = errors.New("nixl: bad argument")
)
