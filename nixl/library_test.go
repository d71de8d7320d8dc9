package nixl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// machine is a pretended file system and environment for the loader.
type machine struct {
	env     map[string]string
	files   []string
	fake    bool             // files are all there is
	broken  map[string]error // by opened path
	stub    map[string]bool
	missing map[string]bool // symbols
	set     map[string]string
	opened  string
}

func (m *machine) options(opts ...Option) *options {
	o := newOptions(opts)
	o.lookupEnv = func(key string) (string, bool) {
		value, ok := m.env[key]
		return value, ok
	}
	o.glob = func(pattern string) (matches []string, err error) {
		for _, f := range m.files {
			if ok, err := filepath.Match(pattern, f); err != nil {
				return nil, err
			} else if ok {
				matches = append(matches, f)
			}
		}
		return matches, nil
	}
	if m.fake {
		o.stat = func(path string) error {
			if !slices.Contains(m.files, path) {
				return fs.ErrNotExist
			}
			return nil
		}
	}
	o.open = func(path string) (uintptr, error) {
		m.opened = path
		return 1, m.broken[path]
	}
	o.stub = func(*capi) bool { return m.stub[m.opened] }
	o.lookup = func(_ uintptr, name string) (uintptr, error) {
		if m.missing[name] {
			return 0, errors.New("undefined symbol")
		}
		return 1, nil
	}
	o.setenv = func(key, value string) error { m.set[key] = value; return nil }
	return o
}

func TestFindTakesPlacesInTheirOrder(t *testing.T) {
	const wheel = "/lib/python3.12/site-packages/.nixl_cu13.mesonpy.libs/libnixl_capi.so"
	all := []string{"/here.so", "/there.so", "/usr/lib/x86_64-linux-gnu/libnixl_capi.so", "/usr/local" + wheel, "/venv" + wheel, "/venv/lib/python3.12/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so", "/home/u/.local" + wheel}
	for _, c := range []struct {
		name string
		path string
		env  map[string]string
		want []string
	}{
		{"path given", "/here.so", map[string]string{LibraryEnv: "/there.so", "VIRTUAL_ENV": "/venv"}, []string{"/here.so"}},
		{"environment", "", map[string]string{LibraryEnv: "/there.so", "VIRTUAL_ENV": "/venv"}, []string{"/there.so"}},
		{"venv first, cu13 before cu12", "", map[string]string{"VIRTUAL_ENV": "/venv", "HOME": "/home/u"}, []string{all[4], all[5], all[6], all[3], all[2]}},
		{"no venv", "", nil, []string{all[3], all[2]}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &machine{env: c.env, files: all, fake: true}
			var got []string
			for _, f := range m.options(WithPath(c.path)).find() {
				got = append(got, f.Path)
			}
			if strings.Join(got, " ") != strings.Join(c.want, " ") {
				t.Errorf("found %v, not %v", got, c.want)
			}
		})
	}
}

func TestMissingLibrarySaysWhatToInstall(t *testing.T) {
	m := &machine{}
	_, err := m.options().load()
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "pip install nixl") || !strings.Contains(err.Error(), LibraryEnv) {
		t.Fatal(err)
	}
}

func TestLibraryWithoutANeededSymbolIsRefusedByName(t *testing.T) {
	file := filepath.Join(t.TempDir(), "libnixl_capi.so")
	must(t, os.WriteFile(file, nil, 0o600))
	m := &machine{set: map[string]string{}, missing: map[string]bool{"nixl_capi_make_xfer_req": true}}
	_, err := m.options(WithPath(file)).load()
	if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "nixl_capi_make_xfer_req") {
		t.Fatal(err)
	}
}

func TestEnvironmentOfTheOperatorWins(t *testing.T) {
	dir := t.TempDir()
	real := filepath.Join(dir, "real.so")
	must(t, os.WriteFile(real, nil, 0o600))
	link := filepath.Join(dir, "libnixl_capi.so")
	must(t, os.Symlink(real, link))
	m := &machine{env: map[string]string{"UCX_LOG_FILE": "/tmp/ucx.log"}, set: map[string]string{}, missing: map[string]bool{"nixl_capi_is_stub": true}}
	_, err := m.options(WithPath(link)).load() // refused in the end for its symbol
	if err == nil || m.opened != real {
		t.Fatalf("opened %q, not the file behind the link: %v", m.opened, err)
	}
	if _, ok := m.set["UCX_LOG_FILE"]; ok || m.set["UCX_DEBUG_SIGNO"] != "0" || m.set["UCX_MEMTYPE_CACHE"] != "n" {
		t.Errorf("set %v", m.set)
	}
}

// Text order puts python3.9 before python3.12.
func TestANewerPythonComesBeforeAnOlder(t *testing.T) {
	wheel := func(python, cuda int) string {
		return fmt.Sprintf("/venv/lib/python3.%d/site-packages/.nixl_cu%d.mesonpy.libs/libnixl_capi.so", python, cuda)
	}
	want := []string{wheel(13, 13), wheel(12, 13), wheel(12, 12), wheel(9, 13)}
	m := &machine{env: map[string]string{"VIRTUAL_ENV": "/venv"}, files: []string{want[3], want[1], want[0], want[2]}, fake: true}
	var got []string
	for _, f := range m.options().find() {
		got = append(got, f.Path)
	}
	if !slices.Equal(got, want) {
		t.Errorf("found %v, not %v", got, want)
	}
}

// To dlopen, a name without a slash is one to look for in the system's folders.
func TestANamedFileIsTakenFromTheWorkingFolder(t *testing.T) {
	t.Chdir(t.TempDir())
	must(t, os.WriteFile("libnixl_capi.so", nil, 0o600))
	want, err := filepath.Abs("libnixl_capi.so")
	must(t, err)
	for name, m := range map[string]*machine{
		"given":       {set: map[string]string{}},
		"environment": {set: map[string]string{}, env: map[string]string{LibraryEnv: "libnixl_capi.so"}},
	} {
		var opts []Option
		if m.env == nil {
			opts = append(opts, WithPath("libnixl_capi.so"))
		}
		if found := m.options(opts...).find(); len(found) != 1 || found[0].Path != want {
			t.Errorf("%s: found %v, not %s", name, found, want)
		}
		l, err := m.options(opts...).load()
		must(t, err)
		if m.opened != want || l.Path != want {
			t.Errorf("%s: opened %q, not %q", name, m.opened, want)
		}
	}
}

func TestANamedFileThatIsMissingIsNotFound(t *testing.T) {
	m := &machine{fake: true, env: map[string]string{LibraryEnv: "/gone/libnixl_capi.so", "VIRTUAL_ENV": "/venv"},
		files: []string{"/venv/lib/python3.12/site-packages/.nixl_cu13.mesonpy.libs/libnixl_capi.so"}}
	if found := m.options().find(); len(found) != 0 {
		t.Errorf("found %v", found)
	}
	_, err := m.options().load()
	for _, want := range []string{"/gone/libnixl_capi.so", LibraryEnv, "pip install nixl"} {
		if !errors.Is(err, ErrNotFound) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("no %s in %v", want, err)
		}
	}
}

func TestALibraryThatCannotBeUsedIsPassedOver(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for _, cuda := range []int{13, 12} {
		for _, python := range []int{13, 12} {
			f := fmt.Sprintf("%s/lib/python3.%d/site-packages/.nixl_cu%d.mesonpy.libs/libnixl_capi.so", dir, python, cuda)
			must(t, os.MkdirAll(filepath.Dir(f), 0o700))
			must(t, os.WriteFile(f, nil, 0o600))
			files = append(files, f)
		}
	}
	order := []string{files[0], files[2], files[1], files[3]} // Python first
	m := &machine{
		env: map[string]string{"VIRTUAL_ENV": dir}, files: files, set: map[string]string{},
		broken: map[string]error{order[0]: errors.New("libcudart.so.13: no such file")}, stub: map[string]bool{order[1]: true},
	}
	l, err := m.options().load()
	must(t, err)
	if l.Path != order[2] {
		t.Errorf("took %s, not %s", l.Path, order[2])
	}
	for _, want := range []string{"the active venv", order[0], "libcudart.so.13: no such file", order[1], "stub", "1 more found, first of them " + order[3]} {
		if !strings.Contains(l.Why, want) {
			t.Errorf("no %q in why: %s", want, l.Why)
		}
	}
	for _, f := range files {
		m.broken[f] = errors.New("cannot be opened")
	}
	_, err = m.options().load()
	for _, f := range files {
		if !strings.Contains(fmt.Sprint(err), f) {
			t.Errorf("%s is not in %v", f, err)
		}
	}
}

func TestWhyTellsOfMoreThanOneLibrary(t *testing.T) {
	dir := t.TempDir()
	file := dir + "/lib/python3.12/site-packages/.nixl_cu13.mesonpy.libs/libnixl_capi.so"
	must(t, os.MkdirAll(filepath.Dir(file), 0o700))
	must(t, os.WriteFile(file, nil, 0o600))
	m := &machine{env: map[string]string{"VIRTUAL_ENV": dir}, files: []string{file, "/usr/lib/libnixl_capi.so"}, set: map[string]string{}}
	l, err := m.options().load()
	must(t, err)
	if want := "the active venv; 1 more found, first of them /usr/lib/libnixl_capi.so"; l.Why != want {
		t.Errorf("why %q, not %q", l.Why, want)
	}
}

func TestAnEmptyVariableOfTheOperatorCountsAsSet(t *testing.T) {
	file := filepath.Join(t.TempDir(), "libnixl_capi.so")
	must(t, os.WriteFile(file, nil, 0o600))
	m := &machine{env: map[string]string{"UCX_MEMTYPE_CACHE": ""}, set: map[string]string{}}
	_, err := m.options(WithPath(file)).load()
	must(t, err)
	if v, ok := m.set["UCX_MEMTYPE_CACHE"]; ok || m.set["UCX_DEBUG_SIGNO"] != "0" {
		t.Errorf("UCX_MEMTYPE_CACHE was set to %q: %v", v, m.set)
	}
}

func FuzzMetadata(f *testing.F) {
	f.Add(fakeMetadata("producer", 7))
	f.Add([]byte("nixlSerDes|Agent\x08\x00\x00\x00\x00\x00\x00\x00producer|Conns"))
	f.Add([]byte("AGENTMETA"))
	f.Fuzz(func(t *testing.T, md []byte) {
		name, err := AgentName(md)
		if err == nil && (name == "" || len(name) > maxName || !strings.Contains(string(md), name)) {
			t.Errorf("name %q of %q", name, md)
		}
	})
}
