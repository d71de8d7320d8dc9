// Package docs keeps the documents true: what they name must exist.
package docs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// reference is `package.Test` or `package.Test/part`.
var reference = regexp.MustCompile("`([a-z][a-z0-9/]*)\\.((?:Test|Fuzz)[A-Z][A-Za-z0-9]*)(?:/([A-Za-z0-9_]+))?`")

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestEveryTestThatIsNamedExists(t *testing.T) {
	for _, doc := range []string{"parity.md", "faults.md", "security.md"} {
		for i, line := range strings.Split(read(t, doc), "\n") {
			at := fmt.Sprintf("%s:%d", doc, i+1)
			for _, r := range reference.FindAllStringSubmatch(line, -1) {
				if err := exists(r[1], r[2], r[3]); err != nil {
					t.Errorf("%s: %s: %v", at, strings.Trim(r[0], "`"), err)
				}
			}
			if loose := regexp.MustCompile(`\b(Test|Fuzz)[A-Z][a-z]\w+`).FindString(reference.ReplaceAllString(line, "")); loose != "" {
				t.Errorf("%s: %s is not named as `package.Test`", at, loose)
			}
		}
	}
}

// exists looks for a test, and for its part: a script, or a name in the package's tests or in the suite that they run.
func exists(pkg, test, part string) error {
	dir := filepath.Join("..", filepath.FromSlash(pkg))
	tests, err := contents(dir, "*_test.go")
	if err != nil {
		return err
	}
	if !bytes.Contains(tests, []byte("\nfunc "+test+"(")) {
		return fmt.Errorf("no such test in %s", pkg)
	}
	if part == "" {
		return nil
	}
	if test == "TestScripts" {
		_, err := os.Stat(filepath.Join(dir, "testdata", "script", part+".txtar"))
		return err
	}
	suite, err := contents(filepath.Join("..", "transfer", "transfertest"), "*.go")
	if err != nil {
		return err
	}
	if name := []byte(`"` + part + `"`); !bytes.Contains(tests, name) && !bytes.Contains(suite, name) {
		return fmt.Errorf("no part of that name")
	}
	return nil
}

func contents(dir, pattern string) ([]byte, error) {
	files, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || files == nil {
		return nil, fmt.Errorf("no %s in %s", pattern, dir)
	}
	var all []byte
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		all = append(all, b...)
	}
	return all, nil
}

// Rows of a table are what begins with a bar and is neither its head nor the line under it.
func rows(text string) [][]string {
	var all [][]string
	head := true
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") {
			head = true
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if !head && !strings.HasPrefix(cells[0], "---") {
			all = append(all, cells)
		}
		head = false
	}
	return all
}

func TestEveryFaultHasATest(t *testing.T) {
	text := read(t, "faults.md")
	shown := map[string]bool{}
	for _, cells := range rows(text) {
		id, _, _ := strings.Cut(cells[0], " ")
		if len(cells) != 4 {
			t.Errorf("%s has %d columns", id, len(cells))
			continue
		}
		if !reference.MatchString(cells[3]) {
			t.Errorf("%s names no test", id)
		}
		if shown[id] {
			t.Errorf("%s stands twice", id)
		}
		shown[id] = true
	}
	_, absent, _ := strings.Cut(text, "## Not here yet")
	var want []string
	for i := range 18 {
		want = append(want, fmt.Sprint("V", i+1))
	}
	for _, n := range []int{1, 2, 4, 5, 9, 10, 30, 33, 44, 45, 48, 54, 57, 58, 64, 65, 68, 71, 75, 78, 89, 91, 100} {
		want = append(want, fmt.Sprint("C", n))
	}
	for _, id := range want {
		if !shown[id] && !slices.Contains(strings.FieldsFunc(absent, func(r rune) bool { return strings.ContainsRune(" ,\n", r) }), id) {
			t.Errorf("%s is not there", id)
		}
	}
}

// A row of the comparison has a test, or says what is missing.
func TestEveryFeatureHasATestOrIsMissing(t *testing.T) {
	for _, cells := range rows(read(t, "parity.md")) {
		if len(cells) != 4 {
			t.Errorf("%q has %d columns", cells[0], len(cells))
			continue
		}
		if !reference.MatchString(cells[2]) && cells[3] == "" {
			t.Errorf("%q has neither a test nor what is missing", cells[0])
		}
	}
}

func TestLinksLeadSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	docs, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range append(docs, "../README.md") {
		for _, m := range link.FindAllStringSubmatch(read(t, doc), -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(doc), m[1])); err != nil {
				t.Errorf("%s: %v", doc, err)
			}
		}
	}
}
