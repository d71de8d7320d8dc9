package wire

import (
	"encoding/json"
	"fmt"
	"slices"
)

// ParamsField is the name under which OpenAI-style bodies carry Params.
const ParamsField = "ec_transfer_params"

// Place is where in an OpenAI-style request or response body ec_transfer_params stands.
type Place uint8

const (
	Nowhere           Place = iota
	TopLevel                // {"ec_transfer_params": ..}: chat completions, request and response
	ExtraArgs               // {"extra_args": {"ec_transfer_params": ..}}
	SamplingExtraArgs       // {"sampling_params": {"extra_args": {"ec_transfer_params": ..}}}: what llm-d sends to /inference/v1/generate
)

var placePaths = [...][]string{
	TopLevel:          {ParamsField},
	ExtraArgs:         {"extra_args", ParamsField},
	SamplingExtraArgs: {"sampling_params", "extra_args", ParamsField},
}

// String gives the path, e.g. "extra_args.ec_transfer_params".
func (p Place) String() string {
	if p == Nowhere || int(p) >= len(placePaths) {
		return "nowhere"
	}
	s := ""
	for _, name := range placePaths[p] {
		s += "." + name
	}
	return s[1:]
}

// FindParams finds ec_transfer_params in a body, the top level first: its text, which points into body, and its place. Nowhere if
// there is none, or null. ErrMalformed if the body is no JSON object. The caller bounds the body's size.
func FindParams(body []byte) (json.RawMessage, Place, error) {
	if err := checkBody(body); err != nil {
		return nil, Nowhere, err
	}
	for place := TopLevel; int(place) < len(placePaths); place++ {
		if v := find(body, placePaths[place]); v != nil && string(v) != "null" {
			return v, place, nil
		}
	}
	return nil, Nowhere, nil
}

// SetParams gives a copy of body that has params at the given place, in the position of an earlier value, else as the last member;
// objects on the way are added where they are missing. params nil takes the field out. Everything else stays byte for byte, but for
// white space between the members of the objects on the way. ErrMalformed if the body is no JSON object, a value on the way is no
// object, or params are not valid JSON.
func SetParams(body []byte, place Place, params json.RawMessage) ([]byte, error) {
	if err := checkBody(body); err != nil {
		return nil, err
	}
	if place == Nowhere || int(place) >= len(placePaths) {
		return nil, fmt.Errorf("wire: no place to set %s", ParamsField)
	}
	if params != nil && !json.Valid(params) {
		return nil, fmt.Errorf("%w: %s to set are not valid JSON", ErrMalformed, ParamsField)
	}
	return set(body, placePaths[place], params)
}

func checkBody(body []byte) error {
	if !json.Valid(body) || body[space(body, 0)] != '{' {
		return fmt.Errorf("%w: the body is no JSON object", ErrMalformed)
	}
	return nil
}

// find gives the value at a path; of members of the same name the last. nil if it is not there.
func find(text []byte, path []string) []byte {
	for _, name := range path {
		var found []byte
		// members fails only if its function does, and what is no object has no members.
		_, _ = members(text, func(m member) error {
			if m.name == name {
				found = m.value
			}
			return nil
		})
		if found == nil {
			return nil
		}
		text = found
	}
	return text
}

// set replaces the value at a path in every member of that name, so that no reader finds another.
func set(text []byte, path []string, params []byte) ([]byte, error) {
	var o object
	found := false
	isObject, err := members(text, func(m member) error {
		if m.name != path[0] {
			o.add(m.rawName, m.value)
			return nil
		}
		found = true
		value := params
		if len(path) > 1 {
			inner := m.value
			if string(inner) == "null" {
				if params == nil {
					o.add(m.rawName, inner)
					return nil
				}
				inner = []byte("{}")
			}
			var err error
			if value, err = set(inner, path[1:], params); err != nil {
				return err
			}
		}
		if value != nil {
			o.add(m.rawName, value)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if !isObject {
		return nil, fmt.Errorf("%w: %s is inside of %s, which is no object", ErrMalformed, path[0], clip(text))
	}
	if !found && params != nil {
		value := params
		for _, name := range slices.Backward(path[1:]) {
			var inner object
			inner.add(encodeName(name), value)
			value = inner.end()
		}
		o.add(encodeName(path[0]), value)
	}
	return o.end(), nil
}
