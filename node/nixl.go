package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// selfTestTimeout bounds the test that the plane must pass before the node says that it is ready.
const selfTestTimeout = time.Minute

// checkNIXL reads the backends and their parameters.
func (s *settings) checkNIXL() error {
	names := s.NIXL.Backends
	if len(names) == 0 {
		names = []string{"UCX"}
	}
	for _, name := range names {
		s.backends = append(s.backends, nixl.Backend{Name: name, Params: map[string]string{}})
	}
	var errs []error
	for _, p := range s.NIXL.Params {
		key, value, ok := strings.Cut(p, "=")
		if !ok || key == "" {
			errs = append(errs, bad("nixl.params", quoted(p), "give KEY=VALUE, or BACKEND.KEY=VALUE for one of several backends"))
			continue
		}
		only, rest, one := strings.Cut(key, ".")
		if one && !slices.Contains(names, only) {
			errs = append(errs, bad("nixl.params", quoted(p), "no backend %s; nixl.backends are %s", only, strings.Join(names, ", ")))
			continue
		}
		for _, b := range s.backends {
			switch {
			case !one:
				b.Params[key] = value
			case b.Name == only:
				b.Params[rest] = value
			}
		}
	}
	return errors.Join(errs...)
}

// unusedNIXL names the settings that say something of NIXL, for where there is none.
func (s *settings) unusedNIXL() (keys []string) {
	if len(s.NIXL.Backends) > 0 {
		keys = append(keys, "nixl.backends")
	}
	if len(s.NIXL.Params) > 0 {
		keys = append(keys, "nixl.params")
	}
	return keys
}

// nixlOptions are the plane's.
func (s *settings) nixlOptions(log *slog.Logger) nixl.Options {
	// Without a trusted network the side channel is on loopback, and so must be what NIXL's agents listen on.
	o := nixl.Options{Library: s.NIXL.Library, Backends: s.backends, Name: "ferry-" + s.Instance, Loopback: !s.Trusted, Log: log}
	if !s.NIXL.InProcess {
		o.Command, o.Outlive = s.NIXL.AgentCommand, true
	}
	return o
}

// ExamineNIXL tries the nixl plane as this configuration has it. The error is the configuration's; the report has the plane's.
func (c Config) ExamineNIXL(ctx context.Context, log *slog.Logger) (nixl.Report, error) {
	s := &settings{Config: c}
	if err := s.checkNIXL(); err != nil {
		return nixl.Report{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, selfTestTimeout)
	defer cancel()
	return nixl.Examine(ctx, s.nixlOptions(log)), nil
}

// takesOver says whether a plane goes on with the agents that outlived the node before.
func (s *settings) takesOver(planes []transfer.Plane) bool {
	return !s.NIXL.InProcess && slices.ContainsFunc(planes, func(p transfer.Plane) bool { return p.Name() == transfer.NIXL })
}

// openNIXL brings the plane up and lets it read from itself, so that a node that says it is ready can move bytes.
func openNIXL(ctx context.Context, s *settings, log *slog.Logger) (transfer.Plane, error) {
	p, err := nixl.New(s.nixlOptions(log))
	if errors.Is(err, nixl.ErrMissing) && s.NIXL.Library == "" && os.Getenv(binding.LibraryEnv) == "" { // who names a file wants NIXL
		return nil, fmt.Errorf("%w: %w", errPlaneMissing, err)
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, selfTestTimeout)
	defer cancel()
	if err := p.SelfTest(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("it cannot read from itself: %w; ferry doctor says more", err), p.Close())
	}
	return &nixlPlane{p, nixl.NewChecker(p)}, nil
}

// nixlPlane is a plane that can be checked.
type nixlPlane struct {
	*nixl.Plane
	*nixl.Checker
}
