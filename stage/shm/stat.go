package shm

import (
	"fmt"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage"
)

// Stat is the size in bytes of what is under a key in a directory (default region.DefaultDir), whoever put it. Nothing is opened, and
// no lock taken. Errors: stage.ErrNotFound, also for a payload that is being made; ErrKey, ErrForeign.
func Stat(dir, key string) (bytes int64, err error) {
	if err := checkKey(key); err != nil {
		return 0, err
	}
	if dir == "" {
		dir = region.DefaultDir
	}
	d, err := openFolder(dir)
	if err != nil {
		return 0, err
	}
	defer d.close()
	st, err := d.stat(key)
	switch {
	case gone(err), err == nil && st.size == 0:
		return 0, fmt.Errorf("%w: key %.64q in %s", stage.ErrNotFound, key, dir)
	case err != nil:
		return 0, err
	}
	return st.size, d.check(key, st)
}
