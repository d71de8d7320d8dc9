package connect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/tcp"
)

// selfTestTimeout bounds what the nixl plane does before it counts as there: agents start, and read from themselves.
const selfTestTimeout = time.Minute

// planeOrder is the order of preference where none is given.
var planeOrder = []string{transfer.Mapped, transfer.NIXL, transfer.TCP}

// makers bring up one plane each.
var makers = map[string]func(context.Context, *Options) (transfer.Plane, error){
	transfer.Mapped: func(_ context.Context, o *Options) (transfer.Plane, error) {
		mo := mapped.Options{Log: o.Log}
		if o.Dir != "" {
			mo.Dirs = []string{o.Dir}
		}
		return mapped.New(mo)
	},
	transfer.TCP: func(ctx context.Context, o *Options) (transfer.Plane, error) {
		to := tcp.Options{AllowHost: o.Client.AllowHost, Log: o.Log}
		if o.Bind != nil {
			to.Host, to.Advertise = o.Bind.Host, o.Advertise
		}
		return tcp.New(ctx, to)
	},
	transfer.NIXL: openNIXL,
}

// openNIXL brings the plane up; one that was asked for by name has to read from itself, so that what is wrong is known at the start.
func openNIXL(ctx context.Context, o *Options) (transfer.Plane, error) {
	p, err := nixl.New(nixl.Options{
		Command: o.AgentCommand, Library: o.Library, Backends: o.Backends, Name: "ferry-stage",
		Loopback: !o.Network && (o.Bind == nil || hostname.Loopback(o.Bind.Host)), Log: o.Log,
	})
	if err != nil || !slices.Contains(o.Planes, transfer.NIXL) {
		return p, err
	}
	ctx, cancel := context.WithTimeout(ctx, selfTestTimeout)
	defer cancel()
	if err := p.SelfTest(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("it cannot read from itself: %w; ferry doctor says more", err), p.Close())
	}
	return p, nil
}

// Planes brings up the planes of o.Planes, or all that are there if that is nil: NIXL is left out then where its library is not
// found. Of o only Planes, Bind, Advertise, Network, Dir, AgentCommand, Library, Backends, Client.AllowHost and Log count. The caller closes
// the planes. Errors wrap ErrOptions, or what a plane says.
func Planes(ctx context.Context, o Options) (_ []transfer.Plane, err error) {
	o.complete()
	var planes []transfer.Plane
	defer func() {
		if err != nil {
			err = errors.Join(err, closePlanes(planes))
		}
	}()
	names := o.Planes
	if names == nil {
		names = planeOrder
	}
	for i, name := range names {
		make, ok := makers[name]
		if !ok || slices.Contains(names[:i], name) {
			return nil, fmt.Errorf("%w: plane %q; want some of %s, each once", ErrOptions, name, strings.Join(planeOrder, ", "))
		}
		p, err := make(ctx, &o)
		switch {
		case err == nil:
			planes = append(planes, p)
		case o.Planes == nil && errors.Is(err, nixl.ErrMissing):
			o.Log.Debug("the nixl plane is left out: there is no other to and from peers that are not ours", "reason", err)
		default:
			return nil, fmt.Errorf("the %s plane: %w", name, err)
		}
	}
	if len(planes) == 0 {
		return nil, fmt.Errorf("%w: no planes; name at least one of %s", ErrOptions, strings.Join(planeOrder, ", "))
	}
	return planes, nil
}

func closePlanes(planes []transfer.Plane) error {
	var errs []error
	for _, p := range planes {
		if err := p.Close(); err != nil {
			errs = append(errs, fmt.Errorf("the %s plane: %w", p.Name(), err))
		}
	}
	return errors.Join(errs...)
}
