package nixl

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"sync"

	"github.com/ebitengine/purego"
)

// LibraryEnv is the environment variable that names the library's file.
const LibraryEnv = "NIXL_CAPI_LIB"

// Library is an opened libnixl_capi. It stays open until the process ends: UCX does not survive being unloaded.
type Library struct {
	// Path of the file, symbolic links resolved; "" for a fake.
	Path string
	// Why this file was taken, for people.
	Why string
	// Version as far as it can be told, e.g. "1.3.2"; else what the symbols say, e.g. "1.3 or 1.4".
	Version string

	c calls
}

// Candidate is a library file that was found.
type Candidate struct{ Path, Why string }

// Option of Load and Find.
type Option func(*options)

type options struct {
	path   string
	getenv func(string) string
	glob   func(string) ([]string, error)
	open   func(path string) (uintptr, error)
	lookup func(library uintptr, name string) (uintptr, error)
	setenv func(key, value string) error
}

// WithPath names the file to open; nothing else is tried.
func WithPath(path string) Option { return func(o *options) { o.path = path } }

func newOptions(opts []Option) *options {
	o := &options{getenv: os.Getenv, glob: filepath.Glob, lookup: purego.Dlsym, setenv: os.Setenv}
	o.open = func(path string) (uintptr, error) { return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL) }
	for _, f := range opts {
		f(o)
	}
	return o
}

// wheelFile is where the wheels nixl-cu12 and nixl-cu13 put the library, below site-packages.
const wheelFile = ".nixl_cu1*.mesonpy.libs/libnixl_capi.so"

// Find lists the libraries of this machine in the order in which Load would take them: the path given, the environment variable
// NIXL_CAPI_LIB, the active Python venv, the user's and the system's site-packages, system folders.
func Find(opts ...Option) []Candidate { return newOptions(opts).find() }

func (o *options) find() []Candidate {
	if o.path != "" {
		return []Candidate{{o.path, "the path given"}}
	}
	if path := o.getenv(LibraryEnv); path != "" {
		return []Candidate{{path, "the environment variable " + LibraryEnv}}
	}
	places := []Candidate{}
	if venv := o.getenv("VIRTUAL_ENV"); venv != "" {
		places = append(places, Candidate{venv + "/lib/python3*/site-packages/" + wheelFile, "the active venv"})
	}
	if home := o.getenv("HOME"); home != "" {
		places = append(places, Candidate{home + "/.local/lib/python3*/site-packages/" + wheelFile, "the user's site-packages"})
	}
	for _, root := range []string{"/usr/local/lib/python3*/site-packages/", "/usr/local/lib/python3*/dist-packages/", "/usr/lib/python3*/site-packages/", "/usr/lib/python3/dist-packages/"} {
		places = append(places, Candidate{root + wheelFile, "the system's site-packages"})
	}
	for _, path := range []string{"/usr/local/nixl/lib/*/libnixl_capi.so", "/opt/nvidia/nvda_nixl/lib/*/libnixl_capi.so", "/usr/local/lib/libnixl_capi.so", "/usr/local/lib/*/libnixl_capi.so", "/usr/lib/libnixl_capi.so", "/usr/lib/*/libnixl_capi.so"} {
		places = append(places, Candidate{path, "a system folder"})
	}
	var found []Candidate
	for _, place := range places {
		matches, err := o.glob(place.Path)
		if err != nil {
			continue
		}
		sort.Sort(sort.Reverse(sort.StringSlice(matches))) // cu13 before cu12, a newer Python before an older
		for _, path := range matches {
			found = append(found, Candidate{path, place.Why})
		}
	}
	return found
}

var loaded struct {
	sync.Mutex
	library *Library
}

// Load finds and opens the library once per process; later calls give the same one. It sets UCX's environment first, except for what the
// operator set (see Environment). ErrNotFound if there is none, ErrUnsupported if it lacks a needed symbol.
func Load(opts ...Option) (*Library, error) {
	o := newOptions(opts)
	loaded.Lock()
	defer loaded.Unlock()
	if loaded.library != nil {
		if o.path != "" && !samePath(o.path, loaded.library.Path) {
			return nil, fmt.Errorf("%w: %s asked for, but this process has opened %s", ErrBadArgument, o.path, loaded.library.Path)
		}
		return loaded.library, nil
	}
	l, err := o.load()
	if err == nil {
		loaded.library = l
	}
	return l, err
}

func samePath(a, b string) bool {
	resolved, err := filepath.EvalSymlinks(a)
	return err == nil && resolved == b
}

func (o *options) load() (*Library, error) {
	candidates := o.find()
	if len(candidates) == 0 {
		return nil, fmt.Errorf("%w: install it with `pip install nixl` into the active venv, or name the file by %s", ErrNotFound, LibraryEnv)
	}
	taken := candidates[0]
	// A symbolic link would break the library's $ORIGIN, by which it finds its plugins and UCX.
	path, err := filepath.EvalSymlinks(taken.Path)
	if err != nil {
		return nil, fmt.Errorf("%w: %s (%s): %w", ErrNotFound, taken.Path, taken.Why, err)
	}
	for key, value := range Environment() {
		if o.getenv(key) != "" {
			continue
		}
		if err := o.setenv(key, value); err != nil {
			return nil, fmt.Errorf("nixl: setting %s: %w", key, err)
		}
	}
	h, err := o.open(path)
	if err != nil {
		return nil, fmt.Errorf("nixl: opening %s (%s): %w", path, taken.Why, err)
	}
	c, err := newCAPI(h, o.lookup)
	if err != nil {
		return nil, fmt.Errorf("%s (%s): %w", path, taken.Why, err)
	}
	if c.call("is_stub") != 0 {
		return nil, fmt.Errorf("%w: %s (%s) is NIXL's stub library", ErrUnsupported, path, taken.Why)
	}
	why := taken.Why
	if n := len(candidates) - 1; n > 0 {
		why = fmt.Sprintf("%s; %d more found, first of them %s", why, n, candidates[1].Path)
	}
	return &Library{Path: path, Why: why, Version: o.version(path, c), c: c}, nil
}

var distInfo = regexp.MustCompile(`nixl_cu1\d-([0-9][0-9A-Za-z.]*)\.dist-info$`)

// version asks the file's wheel, else the symbols.
func (o *options) version(path string, c *capi) string {
	kind := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(filepath.Dir(path)), "."), ".mesonpy.libs")
	if matches, err := o.glob(filepath.Join(filepath.Dir(filepath.Dir(path)), kind+"-*.dist-info")); err == nil && len(matches) > 0 {
		if m := distInfo.FindStringSubmatch(matches[0]); m != nil {
			return m[1]
		}
	}
	if c.has("create_remote_dlist") {
		return "1.5 or newer"
	}
	return "1.3 or 1.4"
}

// Environment is what Load sets before it opens the library, where the operator has not: found by running NIXL 1.3.2 and 1.5.1.
//
//   - UCX_DEBUG_SIGNO=0: UCX would take SIGHUP away from Go.
//   - UCX_LOG_FILE=stderr: UCX would write into stdout.
//   - UCX_MEMTYPE_CACHE=n: GPU memory allocated before UCX loads would be taken for host memory.
//   - UCX_MODULES, on machines without RDMA devices only: libc's exit could crash in libnl, which the InfiniBand modules bring.
func Environment() map[string]string {
	env := map[string]string{"UCX_DEBUG_SIGNO": "0", "UCX_LOG_FILE": "stderr", "UCX_MEMTYPE_CACHE": "n"}
	if devices, err := os.ReadDir("/sys/class/infiniband"); err != nil || len(devices) == 0 {
		env["UCX_MODULES"] = "^ib,ib_efa,ib_mlx5,rdmacm"
	}
	return env
}
