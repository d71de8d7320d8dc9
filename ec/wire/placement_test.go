package wire

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func TestParamsAreFoundAndSetInEveryPlace(t *testing.T) {
	const p, q = `{"k":{"metadata":{}}}`, `{"new":{}}`
	for _, c := range []struct {
		name, body       string
		place            Place
		replaced, erased string
	}{
		{"top", `{"model": "m", "ec_transfer_params": ` + p + `, "x":[1, 2]}`, TopLevel,
			`{"model":"m","ec_transfer_params":` + q + `,"x":[1, 2]}`, `{"model":"m","x":[1, 2]}`},
		{"extra_args", `{"extra_args":{"a":1,"ec_transfer_params":` + p + `},"y":"\u00fc"}`, ExtraArgs,
			`{"extra_args":{"a":1,"ec_transfer_params":` + q + `},"y":"\u00fc"}`, `{"extra_args":{"a":1},"y":"\u00fc"}`},
		{"sampling_params", `{"sampling_params":{"temperature":0.0,"extra_args":{"ec_transfer_params":` + p + `}}}`, SamplingExtraArgs,
			`{"sampling_params":{"temperature":0.0,"extra_args":{"ec_transfer_params":` + q + `}}}`, `{"sampling_params":{"temperature":0.0,"extra_args":{}}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			raw, place, err := FindParams([]byte(c.body))
			if err != nil || place != c.place || string(raw) != p {
				t.Fatalf("%s at %v (%v)", raw, place, err)
			}
			if out, err := SetParams([]byte(c.body), place, json.RawMessage(q)); err != nil || string(out) != c.replaced {
				t.Errorf("set: %s (%v), want %s", out, err, c.replaced)
			}
			out, err := SetParams([]byte(c.body), place, nil)
			if err != nil || string(out) != c.erased {
				t.Errorf("erased: %s (%v), want %s", out, err, c.erased)
			}
			if _, place, err := FindParams(out); place != Nowhere || err != nil {
				t.Errorf("still at %v (%v)", place, err)
			}
			back, err := SetParams([]byte("{}"), c.place, json.RawMessage(p))
			if err != nil {
				t.Fatal(err)
			}
			if raw, place, err := FindParams(back); err != nil || place != c.place || string(raw) != p {
				t.Errorf("set anew: %s", back)
			}
		})
	}
}

func TestTopLevelParamsComeBeforeThoseOfExtraArgs(t *testing.T) {
	for body, want := range map[string]Place{
		`{"extra_args":{"ec_transfer_params":{"b":{}}},"ec_transfer_params":{"a":{}}}`: TopLevel,
		`{"extra_args":{"ec_transfer_params":{"b":{}}},"ec_transfer_params":null}`:     ExtraArgs,
		`{"ec_transfer_params":null}`:                                                                       Nowhere,
		`{"extra_args":null,"sampling_params":7}`:                                                           Nowhere,
		`{"extra_args":["ec_transfer_params"]}`:                                                             Nowhere,
		`{"messages":[{"ec_transfer_params":{}}],"x":"{\"ec_transfer_params\":{}}"}`:                        Nowhere,
		`{"extra_args":{},"sampling_params":{"extra_args":{"ec_transfer_params":{"c":{}}},"extra":[[{}]]}}`: SamplingExtraArgs,
		`{}`: Nowhere,
	} {
		if _, place, err := FindParams([]byte(body)); err != nil || place != want {
			t.Errorf("%s: %v (%v), want %v", body, place, err, want)
		}
	}
}

func TestDuplicateParamsAreFoundAsTheLastAndAllReplaced(t *testing.T) {
	body := `{"ec_transfer_params":{"first":{}},"ec\u005ftransfer_params":{"last":{}}}`
	raw, _, err := FindParams([]byte(body))
	if err != nil || string(raw) != `{"last":{}}` {
		t.Errorf("%s (%v)", raw, err)
	}
	out, err := SetParams([]byte(body), TopLevel, json.RawMessage("{}"))
	if want := `{"ec_transfer_params":{},"ec\u005ftransfer_params":{}}`; err != nil || string(out) != want {
		t.Errorf("%s (%v), want %s", out, err, want)
	}
}

func TestBodiesWithoutRoomForParamsAreRefused(t *testing.T) {
	for _, c := range []struct {
		body   string
		place  Place
		params string
	}{
		{"", TopLevel, "{}"}, {"[]", TopLevel, "{}"}, {`{"a"`, TopLevel, "{}"}, {"null", TopLevel, "{}"},
		{`{"extra_args":7}`, ExtraArgs, "{}"}, {`{"sampling_params":{"extra_args":[]}}`, SamplingExtraArgs, "{}"},
		{"{}", TopLevel, "{"}, {"{}", TopLevel, ""},
	} {
		if out, err := SetParams([]byte(c.body), c.place, json.RawMessage(c.params)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %s (%v)", c.body, out, err)
		}
	}
	for _, p := range []Place{Nowhere, 99} {
		if _, err := SetParams([]byte("{}"), p, json.RawMessage("{}")); err == nil {
			t.Errorf("set at %v", p)
		}
	}
	if _, _, err := FindParams([]byte("x")); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
	out, err := SetParams([]byte(`{"extra_args":null}`), ExtraArgs, json.RawMessage("{}"))
	if err != nil || string(out) != `{"extra_args":{"ec_transfer_params":{}}}` {
		t.Errorf("%s (%v)", out, err)
	}
	out, err = SetParams([]byte(`{"extra_args":null}`), ExtraArgs, nil)
	if err != nil || string(out) != `{"extra_args":null}` {
		t.Errorf("%s (%v)", out, err)
	}
}

func TestPlacesHaveTheNamesOfTheirPaths(t *testing.T) {
	for p, want := range map[Place]string{
		TopLevel: "ec_transfer_params", ExtraArgs: "extra_args.ec_transfer_params",
		SamplingExtraArgs: "sampling_params.extra_args.ec_transfer_params", Nowhere: "nowhere", 99: "nowhere",
	} {
		if p.String() != want {
			t.Errorf("%d: %s, want %s", p, p, want)
		}
	}
}

func TestDeepBodyIsAnErrorOrAResultButNeverAPanic(t *testing.T) {
	for _, depth := range []int{100, 9000, 100_000} {
		body := `{"x":` + strings.Repeat("[", depth) + strings.Repeat("]", depth) + `,"ec_transfer_params":{}}`
		_, place, err := FindParams([]byte(body))
		if (place == TopLevel) == (err != nil) {
			t.Errorf("depth %d: %v, %v", depth, place, err)
		}
	}
}
