package main

import (
	"testing"

	"github.com/tensorferry/tensorferry/ec"
)

func TestAnEntryIsListedWithItsFillerUntilItIsReady(t *testing.T) {
	for _, c := range []struct {
		info  ec.Info
		state string
		owner uint64
	}{
		{ec.Info{State: ec.Filling, Owner: 7}, "not_ready", 7},
		{ec.Info{State: ec.Filling}, "not_ready", 0},
		{ec.Info{State: ec.Ready, Owner: 7}, "ready", 0},
		{ec.Info{State: ec.Ready, Owner: 7, Pins: 1}, "pinned", 0},
	} {
		if l := lineOf(c.info); l.State != c.state || l.Owner != c.owner {
			t.Errorf("%+v: %+v", c.info, l)
		}
	}
}
