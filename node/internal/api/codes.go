package api

import (
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/ec"
)

// Code is an operation's outcome on the wire. Codes are words, so that a log of frames reads by itself; a client treats one it
// does not know as CodeInternal.
type Code string

// The codes.
const (
	CodeOK          Code = ""
	CodeMissing     Code = "missing"
	CodeNotReady    Code = "not_ready"
	CodeHeld        Code = "held"
	CodePending     Code = "pending"
	CodeConflict    Code = "conflict"
	CodeFull        Code = "full"
	CodeTooLarge    Code = "too_large"
	CodeKey         Code = "bad_key"
	CodeSpec        Code = "bad_spec"
	CodeStale       Code = "stale"
	CodePinned      Code = "pinned"
	CodeBadRequest  Code = "bad_request" // a field of the operation is missing or impossible
	CodeUnsupported Code = "unsupported" // an operation this node does not know
	CodeLimit       Code = "limit"       // a limit of the protocol or of the connection
	CodeTimeout     Code = "timeout"
	CodeCanceled    Code = "canceled"
	CodeVersion     Code = "version" // no protocol version in common
	CodeNoPool      Code = "no_pool" // no such pool, or several and none named
	CodeDenied      Code = "denied"  // another user, or a process that the node cannot watch
	CodeClosing     Code = "closing" // the node is ending
	CodeInternal    Code = "internal"
)

// Errors that only the engine API gives. Client code meets them under the same names in package client.
var (
	ErrBadRequest  = errors.New("engine api: bad request")
	ErrUnsupported = errors.New("engine api: the node does not know this operation")
	ErrVersion     = errors.New("engine api: no protocol version in common")
	ErrNoPool      = errors.New("engine api: no such pool")
	ErrDenied      = errors.New("engine api: denied")
	ErrClosing     = errors.New("engine api: the node is ending")
	ErrInternal    = errors.New("engine api: internal error of the node")
)

var codeErrors = []struct {
	code Code
	err  error
}{
	{CodeMissing, ec.ErrMissing},
	{CodeNotReady, ec.ErrNotReady},
	{CodeHeld, ec.ErrHeld},
	{CodePending, ec.ErrPending},
	{CodeConflict, ec.ErrConflict},
	{CodeFull, ec.ErrFull},
	{CodeTooLarge, ec.ErrTooLarge},
	{CodeKey, ec.ErrKey},
	{CodeSpec, ec.ErrSpec},
	{CodeStale, ec.ErrStale},
	{CodePinned, ec.ErrPinned},
	{CodeBadRequest, ErrBadRequest},
	{CodeUnsupported, ErrUnsupported},
	{CodeLimit, ErrLimit},
	{CodeTimeout, context.DeadlineExceeded},
	{CodeCanceled, context.Canceled},
	{CodeVersion, ErrVersion},
	{CodeNoPool, ErrNoPool},
	{CodeDenied, ErrDenied},
	{CodeClosing, ErrClosing},
}

// CodeOf gives the code of an error: that of the first sentinel it wraps.
func CodeOf(err error) Code {
	if err == nil {
		return CodeOK
	}
	for _, c := range codeErrors {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	return CodeInternal
}

// Error is an outcome that came over the wire. errors.Is sees the sentinel that its code stands for.
type Error struct {
	Op      string // the operation, "" for the connection
	Key     string
	Code    Code
	Message string // the node's text
}

// Error implements error.
func (e *Error) Error() string {
	text := e.Message
	if text == "" {
		text = e.Unwrap().Error()
	}
	switch {
	case e.Op == "":
		return text
	case e.Key == "":
		return fmt.Sprintf("%s: %s", e.Op, text)
	}
	return fmt.Sprintf("%s %q: %s", e.Op, e.Key, text)
}

// Unwrap gives the sentinel.
func (e *Error) Unwrap() error {
	for _, c := range codeErrors {
		if c.code == e.Code {
			return c.err
		}
	}
	return ErrInternal
}
