package deploy

import (
	"errors"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// parser reads values. It collects what is wrong, so that all of it is said at once.
type parser struct {
	env  func(string) (string, bool)
	errs []error
	warn []Warning
}

func (p *parser) fail(err error) { p.errs = append(p.errs, err) }

// take gives what is wrong so far, and forgets it.
func (p *parser) take() error {
	err := errors.Join(p.errs...)
	p.errs = nil
	return err
}

func (p *parser) warning(v at, text string) {
	p.warn = append(p.warn, Warning{File: v.file, Key: v.key, Value: v.show(), Text: text})
}

// reference is a value from the environment, in the three ways that vLLM-Omni's files have: $NAME, ${NAME}, and OmegaConf's
// ${oc.env:NAME} with an optional default behind a comma. What else stands in ${} is not for us.
var reference = regexp.MustCompile(`\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^{}]*)\})`)

var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// expand puts the environment into s.
func (p *parser) expand(v at, s string) (string, bool) {
	ok := true
	out := reference.ReplaceAllStringFunc(s, func(ref string) string {
		name, def, hasDefault := strings.Trim(ref[1:], "{}"), "", false
		if rest, oc := strings.CutPrefix(name, "oc.env:"); oc {
			name, def, hasDefault = strings.Cut(rest, ",")
			name, def = strings.TrimSpace(name), strings.TrimSpace(def)
		}
		if !variable.MatchString(name) {
			p.fail(v.bad("%s is no variable of the environment; write the value itself", clip(ref)))
			ok = false
			return ""
		}
		value, set := p.env(name)
		switch {
		case set:
			return value
		case hasDefault:
			return def
		}
		p.fail(v.bad("%s is not set; set it, or write the value itself", name))
		ok = false
		return ""
	})
	return out, ok
}

// text reads a string.
func (p *parser) text(v at) (string, bool) {
	s, ok := v.scalar.(string)
	if !ok {
		p.fail(v.bad("give text; in quotes if it looks like something else"))
		return "", false
	}
	s, ok = p.expand(v, s)
	return strings.TrimSpace(s), ok
}

// number reads a number, or text that is one, as vLLM-Omni does.
func (p *parser) number(v at) (float64, bool) {
	switch x := v.scalar.(type) {
	case int:
		return float64(x), true
	case int64:
		return float64(x), true
	case uint64:
		return float64(x), true
	case float64:
		return x, true
	case string:
		s, ok := p.text(v)
		if !ok {
			return 0, false
		}
		if n, err := strconv.ParseFloat(s, 64); err == nil {
			return n, true
		}
	}
	p.fail(v.bad("give a number"))
	return 0, false
}

// integer reads a whole number from lo to hi. 10.0 is one.
func (p *parser) integer(v at, lo, hi int) (int, bool) {
	n, ok := p.number(v)
	if !ok {
		return 0, false
	}
	if !(n >= float64(lo) && n <= float64(hi) && n == math.Trunc(n)) { // NaN neither
		p.fail(v.bad("give a whole number, %d to %d", lo, hi))
		return 0, false
	}
	return int(n), true
}

const maxSeconds = 1e9 // over 30 years, and fits a time.Duration

// seconds reads a time. Zero, negative, NaN and infinite ones are refused, as is what is below a microsecond.
func (p *parser) seconds(v at) (time.Duration, bool) { return p.duration(v, time.Second, "seconds") }

// milliseconds is seconds of another unit.
func (p *parser) milliseconds(v at) (time.Duration, bool) {
	return p.duration(v, time.Millisecond, "milliseconds")
}

func (p *parser) duration(v at, unit time.Duration, name string) (time.Duration, bool) {
	n, ok := p.number(v)
	if !ok {
		return 0, false
	}
	s := n * unit.Seconds()
	if !(s >= 1e-6 && s <= maxSeconds) {
		p.fail(v.bad("give %s above 0, a finite number; leave it out for the default", name))
		return 0, false
	}
	return time.Duration(math.Round(s * float64(time.Second))), true
}

// unknown is the error about a key that stands where it means nothing.
func (p *parser) unknown(v at, known []string) {
	best, _ := nearest(v.name, known)
	p.fail(v.fail(ErrUnknownKey, "did you mean %s?", best))
}

// misspelt is about keys that are the engine's, unless they are nearly one of ours: that would be ignored, and not be noticed.
func (p *parser) misspelt(v at, ours []string) {
	if best, changes := nearest(v.name, ours); changes > 0 && changes <= 2 {
		p.fail(v.fail(ErrUnknownKey, "did you mean %s?", best))
	}
}
