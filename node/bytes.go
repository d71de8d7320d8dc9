package node

import (
	"fmt"
	"math"
	"math/big"
	"strings"
)

// units of sizes. Decimal ones count in 1000s, those with an i in 1024s, as everywhere outside of memory modules' labels.
var units = map[string]int64{
	"": 1, "b": 1,
	"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
	"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}

// ParseBytes reads a size: a number of bytes ("67108864"), or a number with a unit, decimal (kB, MB, GB, TB) or binary (KiB, MiB,
// GiB, TiB), in upper or lower case ("64MiB", "1.5 GB"). The result is a whole number of bytes above 0.
func ParseBytes(s string) (int64, error) {
	const hint = "give bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB"
	t := strings.TrimSpace(s)
	i := strings.LastIndexAny(t, "0123456789.") + 1
	unit, known := units[strings.ToLower(strings.TrimSpace(t[i:]))]
	if !known {
		return 0, fmt.Errorf("size %q has no unit that is known: %s", s, hint)
	}
	digits := t[:i]
	if digits == "" || len(digits) > 32 || strings.Trim(digits, "0123456789.") != "" {
		return 0, fmt.Errorf("size %q is not a number: %s", s, hint)
	}
	n, ok := new(big.Rat).SetString(digits)
	if !ok {
		return 0, fmt.Errorf("size %q is not a number: %s", s, hint)
	}
	n.Mul(n, new(big.Rat).SetInt64(unit))
	switch {
	case !n.IsInt():
		return 0, fmt.Errorf("size %q is not a whole number of bytes", s)
	case n.Sign() <= 0:
		return 0, fmt.Errorf("size %q is not above 0", s)
	case !n.Num().IsInt64():
		return 0, fmt.Errorf("size %q is over %d bytes", s, int64(math.MaxInt64))
	}
	return n.Num().Int64(), nil
}
