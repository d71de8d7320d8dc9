package nixl

import (
	"slices"

	binding "github.com/tensorferry/tensorferry/nixl"
)

// facts are what is known of the library once an agent has started.
type facts struct {
	Path    string   `json:"path"`
	Why     string   `json:"why"`
	Version string   `json:"version"`
	Plugins []string `json:"plugins"`
}

func factsOf(l *binding.Library, a *binding.Agent) facts {
	plugins, _ := a.Plugins() // for people to read; none is listed if it fails
	slices.Sort(plugins)
	return facts{Path: l.Path, Why: l.Why, Version: l.Version, Plugins: plugins}
}
