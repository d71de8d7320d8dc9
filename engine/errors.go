package engine

import (
	"fmt"
	"net/http"
)

// Error is a request that failed, in the shape that vLLM and OpenAI clients read. It says nothing about other requests: the
// engine goes on.
type Error struct {
	Status  int    // HTTP
	Type    string // as vLLM names it, or EncodingLostError
	Param   string // the part of the request that is at fault, "messages[0].content[1]"
	Message string
}

func (e *Error) Error() string {
	if e.Param == "" {
		return e.Message
	}
	return e.Param + ": " + e.Message
}

type errorBody struct {
	Error errorFields `json:"error"`
}

type errorFields struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    int     `json:"code"`
}

func (e *Error) body() errorBody {
	b := errorBody{errorFields{Message: e.Error(), Type: e.Type, Code: e.Status}}
	if e.Param != "" {
		b.Error.Param = &e.Param
	}
	return b
}

func badRequest(param, format string, args ...any) *Error {
	return &Error{http.StatusBadRequest, "BadRequestError", param, fmt.Sprintf(format, args...)}
}

func tooLarge(format string, args ...any) *Error {
	return &Error{http.StatusRequestEntityTooLarge, "RequestTooLargeError", "", fmt.Sprintf(format, args...)}
}

func unavailable(format string, args ...any) *Error {
	return &Error{http.StatusServiceUnavailable, "ServiceUnavailableError", "", fmt.Sprintf(format, args...)}
}

// lost is a needed encoding that is nowhere, with no media to make it from. It is a 500 since orchestrators encode again and
// repeat the request at that status (--decode-retries).
func lost(param, format string, args ...any) *Error {
	return &Error{http.StatusInternalServerError, "EncodingLostError", param, fmt.Sprintf(format, args...)}
}

func internal(param, format string, args ...any) *Error {
	return &Error{http.StatusInternalServerError, "InternalServerError", param, fmt.Sprintf(format, args...)}
}
