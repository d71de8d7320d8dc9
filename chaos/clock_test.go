package chaos

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// ofDay are the names by which a program gets at the time of day, or makes a time without its monotonic part.
var ofDay = map[string]bool{
	"Unix": true, "UnixNano": true, "UnixMilli": true, "UnixMicro": true, "Date": true, "AddDate": true, "UTC": true,
	"In": true, "Truncate": true, "Gettimeofday": true, "Time": true, "ModTime": true, "Mtim": true, "Ctim": true, "Atim": true,
	"CLOCK_REALTIME": true, "CLOCK_REALTIME_COARSE": true, "CLOCK_TAI": true,
}

// forPeople are the places where the time of day is meant: no wait, lease or age is made of it.
var forPeople = map[string]string{
	"region/create.go: UnixNano":     "when the file was made, for `ferry inspect`",
	"region/create.go: UnixMicro":    "where the generations of a new file start, if there is none before it to go on from",
	"region/attach.go: Unix":         "when the file was made, read",
	"node/client/client.go: Unix":    "a deadline in the distant past ends a wait now",
	"node/client/reconnect.go: Unix": "the same",
}

// The time of day is set back and forth by people and daemons. What a test cannot do to the machine that it runs on, setting its clock, this
// one makes needless: nothing in the packages that have leases, waits and ages looks at the time of day. time.Time values that Now
// gives are compared by their monotonic part as long as nobody takes it away, which the names above do.
func TestNoLeaseLooksAtTheTimeOfDay(t *testing.T) {
	files := 0
	for _, dir := range []string{"region", "control", "transfer", "ec", "node"} {
		err := filepath.WalkDir(filepath.Join("..", dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "transfertest") {
				return err
			}
			files++
			set := token.NewFileSet()
			f, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				s, ok := n.(*ast.SelectorExpr)
				if !ok || !ofDay[s.Sel.Name] || isType(s) {
					return true
				}
				place := fmt.Sprintf("%s: %s", strings.TrimPrefix(path, "../"), s.Sel.Name)
				if _, meant := forPeople[place]; !meant {
					t.Errorf("%s: the time of day, or a time without its monotonic part: %s", set.Position(s.Pos()), place)
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	if files < 50 {
		t.Errorf("%d files looked at", files)
	}
}

// isType: time.Time as the type of something is no clock.
func isType(s *ast.SelectorExpr) bool {
	x, ok := s.X.(*ast.Ident)
	return ok && x.Name == "time" && s.Sel.Name == "Time"
}
