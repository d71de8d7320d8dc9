package nixl

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// machine is a pretended file system and environment for the loader.
type machine struct {
	env     map[string]string
	files   []string
	missing map[string]bool // symbols
	set     map[string]string
	opened  string
}

func (m *machine) options(opts ...Option) *options {
	o := newOptions(opts)
	o.getenv = func(key string) string { return m.env[key] }
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
	o.open = func(path string) (uintptr, error) { m.opened = path; return 1, nil }
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
	all := []string{"/usr/lib/x86_64-linux-gnu/libnixl_capi.so", "/usr/local" + wheel, "/venv" + wheel, "/venv/lib/python3.12/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so", "/home/u/.local" + wheel}
	for _, c := range []struct {
		name string
		path string
		env  map[string]string
		want []string
	}{
		{"path given", "/here.so", map[string]string{LibraryEnv: "/there.so", "VIRTUAL_ENV": "/venv"}, []string{"/here.so"}},
		{"environment", "", map[string]string{LibraryEnv: "/there.so", "VIRTUAL_ENV": "/venv"}, []string{"/there.so"}},
		{"venv first, cu13 before cu12", "", map[string]string{"VIRTUAL_ENV": "/venv", "HOME": "/home/u"}, []string{all[2], all[3], all[4], all[1], all[0]}},
		{"no venv", "", nil, []string{all[1], all[0]}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &machine{env: c.env, files: all}
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

func FuzzMetadata(f *testing.F) {
	f.Add(fakeMetadata("producer", 7))
	f.Add([]byte("nixlSerDes|Agent\x08\x00\x00\x00\x00\x00\x00\x00producer|Conns"))
	f.Add([]byte("AGENTMETA"))
	f.Fuzz(func(t *testing.T, md []byte) {
		name, err := peekName(md)
		if err == nil && (name == "" || len(name) > maxName || !strings.Contains(string(md), name)) {
			t.Errorf("name %q of %q", name, md)
		}
	})
}
