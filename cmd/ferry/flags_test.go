package main

import (
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/node"
)

func TestEveryKeyOfTheConfigurationIsAFlagWithHelp(t *testing.T) {
	a := &app{}
	cmd := a.nodeCmd()
	known := make(map[string]bool)
	for _, k := range node.Keys() {
		known[k] = true
		f := cmd.Flags().Lookup(flagName(k))
		if f == nil {
			t.Errorf("key %s has no flag", k)
			continue
		}
		if configHelp[k] == "" {
			t.Errorf("--%s has no help: add it to configHelp", f.Name)
		}
	}
	for k := range configHelp {
		if !known[k] {
			t.Errorf("help for %s, which is no key", k)
		}
	}
	for k := range switches {
		if !known[k] {
			t.Errorf("switch %s is no key", k)
		}
	}
}

func TestFileNamesOfKeysAreSafeAndUnique(t *testing.T) {
	for key, want := range map[string]string{
		"abc-DEF_1.2":   "abc-DEF_1.2",
		"":              "",
		".":             "%2E",
		"..":            "%2E.",
		"../etc/passwd": "%2E.%2Fetc%2Fpasswd",
		"a/b":           "a%2Fb",
		"a%2Fb":         "a%252Fb",
		"a\x00b\n":      "a%00b%0A",
		"é":             "%C3%A9",
	} {
		if got := fileName(key, ".bin"); got != want+".bin" {
			t.Errorf("fileName(%q) = %q, want %q", key, got, want+".bin")
		}
	}
}

func TestLongKeysGetFileNamesThatAFileSystemTakes(t *testing.T) {
	// The digits are those of sha256sum over the key.
	for _, c := range []struct{ name, key, want string }{
		{"the longest that stays", strings.Repeat("k", 251), strings.Repeat("k", 251)},
		{"one more", strings.Repeat("k", 252), strings.Repeat("k", 180) + "-2e9724a8898370c4"},
		{"escapes to the cut", strings.Repeat("/", 100), strings.Repeat("%2F", 60) + "-4aaecdd8a94cb7ab"},
		{"an escape across the cut", "kk" + strings.Repeat("/", 100), "kk" + strings.Repeat("%2F", 59) + "-160ae89a199f197d"},
	} {
		got := fileName(c.key, ".bin")
		if got != c.want+".bin" || len(got) > 255 {
			t.Errorf("%s: %q, want %q", c.name, got, c.want+".bin")
		}
	}
}

func TestShapeOfPutIsChecked(t *testing.T) {
	for s, want := range map[string][2]int64{"4,1024": {4, 1024}, " 1 , 1 ": {1, 1}} {
		r, w, err := parseShape(s)
		if err != nil || [2]int64{r, w} != want {
			t.Errorf("parseShape(%q) = %d, %d, %v", s, r, w, err)
		}
	}
	for _, s := range []string{"", "4", "4x4", "0,4", "4,-1", "4,4,4", "1.5,4", "99999999999999999999,1", "4611686018427387904,4"} {
		if _, _, err := parseShape(s); err == nil {
			t.Errorf("parseShape(%q) was accepted", s)
		}
	}
}

func TestMoreKeysThanAPeerTakesAreNotAnnounced(t *testing.T) {
	args := []string{"ec", "announce", "--socket", "/nonexistent"}
	for i := range wire.MaxEntries + 1 {
		args = append(args, "k"+strconv.Itoa(i))
	}
	var errs strings.Builder
	if code := run(args, strings.NewReader(""), io.Discard, &errs); code != exitUsage || !strings.Contains(errs.String(), "at most 10000") {
		t.Errorf("status %d, %q", code, errs.String())
	}
	errs.Reset()
	if code := run(append(args[:len(args)-1], "k0"), strings.NewReader(""), io.Discard, &errs); code != exitFailed {
		t.Errorf("as many as it takes, and one of them twice: status %d, %q", code, errs.String())
	}
}

func TestHelpOfEveryCommandCanBePrinted(t *testing.T) {
	for _, c := range []string{"", "node", "engine", "demo", "ec", "ec put", "ec announce", "ec fetch", "ec ls", "doctor", "version"} {
		var out strings.Builder
		if code := run(append(strings.Fields(c), "--help"), strings.NewReader(""), &out, io.Discard); code != exitOK || !strings.Contains(out.String(), "Usage:") {
			t.Errorf("ferry %s --help: status %d, %q", c, code, out.String())
		}
	}
}

func FuzzFileName(f *testing.F) {
	f.Add("../x")
	f.Add("a%2Fb")
	f.Fuzz(func(t *testing.T, key string) {
		name := fileName(key, ".bin")
		if strings.ContainsAny(name, "/\x00") || strings.HasPrefix(name, ".") && name != ".bin" || len(name) > 255 {
			t.Errorf("fileName(%q) = %q", key, name)
		}
	})
}
