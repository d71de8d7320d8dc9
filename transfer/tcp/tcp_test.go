package tcp

import (
	"errors"
	"testing"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func newPlane(t *testing.T, o Options) *Plane {
	t.Helper()
	p, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestTCPPlaneConforms(t *testing.T) {
	transfertest.Run(t, func(t *testing.T, _ string) (producer, consumer transfer.Plane) {
		// The suite makes up metadata: no other host may be looked up or dialled.
		loopback := func(host string) error {
			if host != "127.0.0.1" {
				return errors.New("not this host")
			}
			return nil
		}
		return newPlane(t, Options{}), newPlane(t, Options{AllowHost: loopback})
	})
}
