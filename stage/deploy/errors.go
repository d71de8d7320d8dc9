package deploy

import (
	"errors"
	"fmt"
	"math"

	"github.com/agnivade/levenshtein"

	"github.com/tensorferry/tensorferry/internal/shorten"
)

var (
	// ErrConfig is wrapped by every error of this package about what a file or the environment says.
	ErrConfig = errors.New("deploy: configuration")
	// ErrUnknownKey: a key that means nothing where it stands. The text names the nearest one that does.
	ErrUnknownKey = errors.New("deploy: unknown key")
	// ErrBase: a base_config that cannot be followed: missing, in a circle, or too deep.
	ErrBase = errors.New("deploy: base_config")
	// ErrConnector: a stage uses a connector that this end does not have.
	ErrConnector = errors.New("deploy: no such connector")
	// ErrPort: a port that the formula puts outside of 1 to 65535, or an argument outside of its range.
	ErrPort = errors.New("deploy: port")
	// ErrCollision: two listeners of one host have one port.
	ErrCollision = errors.New("deploy: port collision")
	// ErrNoStage: the deployment has no such stage.
	ErrNoStage = errors.New("deploy: no such stage")
)

// Error is about one value. It wraps ErrConfig, and Err if that says more.
type Error struct {
	Err   error  // one of the sentinels
	File  string // or "environment"
	Key   string // path of the key, such as connectors.nixl.extra.zmq_port, or the variable's name
	Value string // as it was found, shortened
	Text  string // what is wrong with it, and what to do
}

func (e *Error) Error() string {
	return fmt.Sprintf("%v: %s: %s: %s: %s", e.Err, e.File, e.Key, e.Value, e.Text)
}

func (e *Error) Unwrap() []error {
	if e.Err == ErrConfig {
		return []error{ErrConfig}
	}
	return []error{e.Err, ErrConfig}
}

// Warning is about a value that is legal and may not do what was meant.
type Warning struct{ File, Key, Value, Text string }

func (w Warning) String() string {
	return fmt.Sprintf("%s: %s: %s: %s", w.File, w.Key, w.Value, w.Text)
}

// nearest is the known word with the fewest changes, and how many they are.
func nearest(word string, known []string) (best string, changes int) {
	changes = math.MaxInt
	for _, k := range known {
		if n := levenshtein.ComputeDistance(clip(word), k); n < changes {
			best, changes = k, n
		}
	}
	return best, changes
}

// clip shortens what a file says, for a message.
func clip(s string) string { return shorten.Text(s, 120) }
