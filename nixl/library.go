package nixl

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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
	path      string
	lookupEnv func(string) (string, bool)
	glob      func(string) ([]string, error)
	stat      func(string) error
	open      func(path string) (uintptr, error)
	lookup    func(library uintptr, name string) (uintptr, error)
	stub      func(*capi) bool
	setenv    func(key, value string) error
}

func (o *options) getenv(key string) string {
	value, _ := o.lookupEnv(key)
	return value
}

// WithPath names the file to open; nothing else is tried. A relative path is one from the working folder.
func WithPath(path string) Option { return func(o *options) { o.path = path } }

func newOptions(opts []Option) *options {
	o := &options{lookupEnv: os.LookupEnv, glob: filepath.Glob, lookup: purego.Dlsym, stub: (*capi).isStub, setenv: os.Setenv}
	o.stat = func(path string) error {
		_, err := os.Stat(path)
		return err
	}
	o.open = func(path string) (uintptr, error) { return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL) }
	for _, f := range opts {
		f(o)
	}
	return o
}

// wheelFile is where the wheels nixl-cu12 and nixl-cu13 put the library, below site-packages.
const wheelFile = ".nixl_cu1*.mesonpy.libs/libnixl_capi.so"

// Find lists the libraries of this machine, none if there is none, in the order in which Load tries them: the path given, or else the environment variable
// NIXL_CAPI_LIB, and nothing else if either names a file; or else the active Python venv (VIRTUAL_ENV), the user's site-packages
// (below HOME/.local), the system's, system folders. In one place a newer Python comes before an older, and CUDA 13 before 12.
// Paths are absolute, and files are there. Nothing is opened.
func Find(opts ...Option) []Candidate { return newOptions(opts).find() }

// named is the one file that counts if there is one, by WithPath or the environment. It need not be there.
func (o *options) named() (Candidate, bool) {
	path, why := o.path, "the path given"
	if path == "" {
		path, why = o.getenv(LibraryEnv), "the environment variable "+LibraryEnv
	}
	if path == "" {
		return Candidate{}, false
	}
	// To dlopen, a name without a slash is one to look for in the system's folders.
	if absolute, err := filepath.Abs(path); err == nil {
		path = absolute
	}
	return Candidate{path, why}, true
}

func (o *options) find() []Candidate {
	if c, ok := o.named(); ok {
		if o.stat(c.Path) != nil {
			return nil
		}
		return []Candidate{c}
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
		slices.SortFunc(matches, func(a, b string) int { return compareVersions(b, a) }) // cu13 before cu12, a newer Python before an older
		for _, path := range matches {
			if absolute, err := filepath.Abs(path); err == nil {
				path = absolute
			}
			found = append(found, Candidate{path, place.Why})
		}
	}
	return found
}

// compareVersions compares text, and runs of digits in it by their value: python3.9 comes before python3.12.
func compareVersions(a, b string) int {
	for a != "" && b != "" {
		if n, m := digits(a), digits(b); n > 0 && m > 0 {
			x, y := strings.TrimLeft(a[:n], "0"), strings.TrimLeft(b[:m], "0")
			if c := cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(x, y)); c != 0 {
				return c
			}
			a, b = a[n:], b[m:]
			continue
		}
		if a[0] != b[0] {
			break
		}
		a, b = a[1:], b[1:]
	}
	return strings.Compare(a, b)
}

// digits is the length of the run of digits that s begins with.
func digits(s string) int {
	if i := strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		return i
	}
	return len(s)
}

var loaded struct {
	sync.Mutex
	library *Library
}

// Load finds and opens the library once per process; later calls give the same one. Of several (see Find) the first that can be used is
// taken; what was wrong with those before it is in Library.Why. It sets UCX's environment first, except for what the operator set, be
// it to nothing (see Environment). ErrNotFound if there is none, ErrUnsupported if it lacks a needed symbol or is NIXL's stub, ErrBadArgument
// if WithPath names another file than the process has opened; else what dlopen said. Load may be called again after an error, when a library
// was installed or with another path; the environment that it set stays.
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
	if absolute, err := filepath.Abs(a); err == nil {
		a = absolute
	}
	resolved, err := filepath.EvalSymlinks(a)
	return err == nil && resolved == b
}

const howToInstall = "install it with `pip install nixl` into the active venv, or name the file by " + LibraryEnv

func (o *options) load() (*Library, error) {
	candidates := o.find()
	if len(candidates) == 0 {
		if c, ok := o.named(); ok {
			return nil, fmt.Errorf("%w: %s (%s): %w; correct it, or %s", ErrNotFound, c.Path, c.Why, o.stat(c.Path), howToInstall)
		}
		return nil, fmt.Errorf("%w: %s", ErrNotFound, howToInstall)
	}
	var bad []error
	for i, taken := range candidates {
		l, err := o.openOne(taken)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		for _, err := range bad {
			l.Why += fmt.Sprintf("; passed over: %v", err)
		}
		if more := candidates[i+1:]; len(more) > 0 {
			l.Why += fmt.Sprintf("; %d more found, first of them %s", len(more), more[0].Path)
		}
		return l, nil
	}
	return nil, errors.Join(bad...)
}

func (o *options) openOne(taken Candidate) (*Library, error) {
	// A symbolic link would break the library's $ORIGIN, by which it finds its plugins and UCX.
	path, err := filepath.EvalSymlinks(taken.Path)
	if err != nil {
		return nil, fmt.Errorf("%w: %s (%s): %w", ErrNotFound, taken.Path, taken.Why, err)
	}
	for key, value := range Environment() {
		if _, set := o.lookupEnv(key); set {
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
	if o.stub(c) {
		return nil, fmt.Errorf("%w: %s (%s) is NIXL's stub library", ErrUnsupported, path, taken.Why)
	}
	return &Library{Path: path, Why: taken.Why, Version: o.version(path, c), c: c}, nil
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

// Environment is what Load sets before it opens the library, where the operator has not (an empty value counts as set): found by running NIXL 1.3.2 and 1.5.1.
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
