package node

import (
	"context"
	"errors"
	"log/slog"
	"strings"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/tcp"
)

// planeMaker brings up one data plane for a node's settings. errPlaneMissing: this build or this machine has none. A node that was
// not asked for the plane by name then does without.
type planeMaker func(ctx context.Context, s *settings, log *slog.Logger) (transfer.Plane, error)

// planeMakers are the planes that can be named.
var planeMakers = map[string]planeMaker{
	transfer.Mapped: func(_ context.Context, s *settings, log *slog.Logger) (transfer.Plane, error) {
		return mapped.New(mapped.Options{Dirs: []string{s.ShmDir}, Log: log})
	},
	transfer.TCP: func(ctx context.Context, s *settings, log *slog.Logger) (transfer.Plane, error) {
		return tcp.New(ctx, tcp.Options{
			Host: s.host, Port: s.DataPort, Advertise: s.advertise, AllowHost: s.hosts.allow,
			ProgressTimeout: s.Timeouts.Read, Log: log,
		})
	},
	transfer.NIXL: openNIXL,
}

// planeOrder is the order of preference where the configuration gives none.
var planeOrder = []string{transfer.Mapped, transfer.NIXL, transfer.TCP}

var errPlaneMissing = errors.New("the data plane is missing")

func planeNames() string { return strings.Join(planeOrder, ", ") }

// openPlanes brings up the planes that were asked for by name, or all that are there. Those that are up when one fails are closed.
func openPlanes(ctx context.Context, s *settings, log *slog.Logger) (_ []transfer.Plane, err error) {
	var planes []transfer.Plane
	defer func() {
		if err != nil {
			for _, p := range planes {
				_ = p.Close()
			}
		}
	}()
	names := s.Planes
	if names == nil {
		names = planeOrder
	}
	for _, name := range names {
		p, err := planeMakers[name](ctx, s, log)
		switch {
		case err == nil:
			planes = append(planes, p)
		case s.Planes == nil && errors.Is(err, errPlaneMissing):
			log.Debug("data plane left out", "plane", name, "reason", err)
			if unused := s.unusedNIXL(); name == transfer.NIXL && unused != nil {
				log.Warn("settings have no effect: NIXL is not there; ferry doctor says more", "settings", unused)
			}
		default:
			return nil, badPlane(name, err)
		}
	}
	if len(planes) == 0 {
		return nil, bad("planes", "none", "name at least one of %s", planeNames())
	}
	return planes, nil
}

func badPlane(name string, err error) error {
	return bad("planes", name, "%w; take it out of planes, or leave planes out for all that are there", err)
}
