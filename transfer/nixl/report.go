package nixl

import (
	"context"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	binding "github.com/tensorferry/tensorferry/nixl"
)

// Report is what there is to know about NIXL on this machine: for ferry doctor.
type Report struct {
	Candidates []binding.Candidate // libraries found, the one that is taken first
	Path       string              // of the library that was opened; "" if none was
	Why        string              // that one
	Version    string
	Plugins    []string // backends that it can create
	Backends   []Backend
	Variables  []Variable    // of UCX and NIXL that are in force, by name
	Transports []string      // that UCX picked for the self-test, in its own words; nil with agents in this process
	SelfTest   time.Duration // a plane made, its agents started, 1 MiB served, read and compared
	Err        error         // nil: all of that worked
}

// Variable is an environment variable in force.
type Variable struct {
	Name, Value string
	Ours        bool // set by the binding, because nobody else did
}

// Examine makes a plane, lets it read from itself, and says how that went. ctx bounds it.
func Examine(ctx context.Context, o Options) Report {
	o = o.withDefaults()
	var mu sync.Mutex
	var transports []string
	if os.Getenv("UCX_LOG_LEVEL") == "" {
		o.environ = append(o.environ, "UCX_LOG_LEVEL=info")
	}
	o.says = func(line string) {
		mu.Lock()
		defer mu.Unlock()
		if t := transport(line); t != "" && !slices.Contains(transports, t) {
			transports = append(transports, t)
		}
	}
	r := Report{Candidates: binding.Find(o.libraryOptions()...), Backends: o.Backends, Variables: variables(os.Environ())}
	start := time.Now()
	p, err := New(o)
	if err != nil {
		r.Err = err
		return r
	}
	r.Err = p.SelfTest(ctx)
	r.SelfTest = time.Since(start)
	f := p.lastFacts()
	r.Path, r.Why, r.Version, r.Plugins = f.Path, f.Why, f.Version, f.Plugins
	if err := p.Close(); r.Err == nil {
		r.Err = err
	}
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(transports)
	r.Transports = transports
	return r
}

// transport takes what UCX says of an endpoint's lanes, as "intra-node cfg#1 rma_am(tcp/lo) am(cma/memory)", or "".
func transport(line string) string {
	at := strings.Index(line, " cfg#")
	if at < 0 {
		return ""
	}
	start := strings.LastIndexByte(line[:at], ' ') + 1
	_, lanes, _ := strings.Cut(line[at+1:], " ")
	return line[start:at] + ": " + strings.Join(strings.Fields(lanes), " ")
}

// variables are those of environ that UCX and NIXL look at, and those that the binding sets.
func variables(environ []string) []Variable {
	all := map[string]Variable{}
	for name, value := range binding.Environment() {
		all[name] = Variable{name, value, true}
	}
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		if (strings.HasPrefix(name, "UCX_") || strings.HasPrefix(name, "NIXL_")) && value != "" {
			all[name] = Variable{name, value, false}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b Variable) int { return strings.Compare(a.Name, b.Name) })
}
