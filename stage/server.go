package stage

import (
	"context"
	"errors"
	"log/slog"

	"github.com/tensorferry/tensorferry/control"
)

// ServerOptions of a Server.
type ServerOptions struct {
	Loop  *control.Loop // the caller's
	Store *Store        // the caller's
	Host  string        // to bind
	Port  int           // 0: any free one
	Node  string        // our instance, told to own readers

	MaxWaiting int // gets that wait for a put, of all connections; default 4,096. Beyond: NotFound at once
	Log        *slog.Logger
}

// Server answers claims: of own readers and of plain ones, on one socket.
type Server struct{}

// Serve binds and starts to answer. The caller closes it, before store and loop.
func Serve(ctx context.Context, o ServerOptions) (*Server, error) { return nil, errors.New("not built") }

// Port is the bound port.
func (s *Server) Port() int { return 0 }

// Local names the way to this server for own readers of this machine, see control.Router; "" if there is none.
func (s *Server) Local() string { return "" }

// Close stops answering.
func (s *Server) Close() error { return nil }
