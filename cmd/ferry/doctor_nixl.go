package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/transfer"
)

const fixNIXL = "pip install nixl into the active venv, or name libnixl_capi.so with NIXL_CAPI_LIB or nixl.library; without it unmodified vLLM peers are answered NACK_INTERNAL"

// checkNIXL tries the nixl plane, unless the configuration names planes without it.
func checkNIXL(ctx context.Context, c node.Config) []finding {
	named := slices.Contains(c.Planes, transfer.NIXL)
	if len(c.Planes) > 0 && !named {
		return nil
	}
	r, err := c.ExamineNIXL(ctx, slog.New(slog.DiscardHandler))
	if err != nil {
		return []finding{{"nixl", fail, err.Error(), ""}}
	}
	bad := warn
	if named {
		bad = fail
	}
	if file := cmp.Or(c.NIXL.Library, os.Getenv(nixl.LibraryEnv)); len(r.Candidates) == 0 && file != "" { // a node does not start then
		return []finding{{"nixl", fail, fmt.Sprintf("%s, which nixl.library or %s names, is not there", file, nixl.LibraryEnv), fixNIXL}}
	}
	if len(r.Candidates) == 0 {
		return []finding{{"nixl", bad, "no libnixl_capi.so found", fixNIXL}}
	}
	if r.Path == "" {
		return []finding{{"nixl", bad, fmt.Sprintf("%s (%s): %v", r.Candidates[0].Path, r.Candidates[0].Why, r.Err), fixNIXL}}
	}
	found := []finding{{"nixl", good, fmt.Sprintf("%s at %s (%s); plugins %s", r.Version, r.Path, r.Why, strings.Join(r.Plugins, ", ")), ""}}
	var variables []string
	for _, v := range r.Variables {
		text := v.Name + "=" + v.Value
		if v.Ours {
			text += " (set by ferry)"
		}
		variables = append(variables, text)
	}
	found = append(found, finding{"nixl env", good, strings.Join(variables, ", "), ""})
	if r.Err != nil {
		return append(found, finding{"nixl self-transfer", bad, r.Err.Error(), "look at the UCX_ variables above"})
	}
	detail := fmt.Sprintf("1 MiB served, read and compared, all in %v", r.SelfTest.Round(time.Millisecond))
	if len(r.Transports) > 0 {
		detail += "; " + strings.Join(r.Transports, "; ")
	}
	return append(found, finding{"nixl self-transfer", good, detail, ""})
}
