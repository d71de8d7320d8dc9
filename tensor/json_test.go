package tensor

import (
	"errors"
	"math"
	"strings"
	"testing"
)

func TestJSONKeepsOrderAndTellsIntsFromFloats(t *testing.T) {
	const text = `{"z":1,"a":[1.0,-3,18446744073709551615,2.5e-07,true,null,"<é\n>"],"m":{},"l":[]}`
	root, err := ParseJSON([]byte(" " + text + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := Map{
		Field("z", Int(1)),
		Field("a", List{Float(1), Int(-3), Uint(math.MaxUint64), Float(2.5e-7), Flag(true), Null{}, String("<é\n>")}),
		Field("m", Map{}),
		Field("l", List{}),
	}
	if !Equal(root, want) {
		t.Errorf("%v, want %v", root, want)
	}
	back, err := AppendJSON([]byte("> "), root)
	if err != nil || string(back) != "> "+text {
		t.Errorf("%s, %v, want %s", back, err, text)
	}
}

func TestJSONEscapesAreCharacters(t *testing.T) {
	for text, want := range map[string]string{
		`"\ud83d\ude00"`:       "\U0001f600",
		`"\uD83D\uDE00\u00e9"`: "\U0001f600é",
		`"\\ud800"`:            `\ud800`,
		`"\ufffd\ue000\ud7ff"`: "\ufffd\ue000\ud7ff",
	} {
		if n, err := ParseJSON([]byte(text)); err != nil || n != String(want) {
			t.Errorf("%s became %v, %v", text, n, err)
		}
	}
}

func TestJSONThatIsNoTreeIsRefused(t *testing.T) {
	for _, c := range []struct {
		text string
		want error
	}{
		{``, ErrFile},
		{`{"a":`, ErrFile},
		{`{"a" 1}`, ErrFile},
		{`[1,]`, ErrFile},
		{`[1`, ErrFile},
		{`1 2`, ErrFile},
		{`{"a":1}}`, ErrFile},
		{"\"\xff\"", ErrFile},
		{`"\ud800"`, ErrFile},
		{`"a\uDBFF\u0041"`, ErrFile},
		{`{"\udc00":1}`, ErrFile},
		{`"\ud800\ud800\udc00"`, ErrFile},
		{`NaN`, ErrFile},
		{`{"a":1,"a":2}`, ErrTree},
		{`18446744073709551616`, ErrTree},
		{`1e999`, ErrTree},
		{strings.Repeat("[", MaxDepth+1) + strings.Repeat("]", MaxDepth+1), ErrLimit},
	} {
		if n, err := ParseJSON([]byte(c.text)); !errors.Is(err, c.want) {
			t.Errorf("%.40s: %v, %v; want %v", c.text, n, err, c.want)
		}
	}
	if _, err := ParseJSON([]byte(strings.Repeat("[", MaxDepth) + strings.Repeat("]", MaxDepth))); err != nil {
		t.Error(err)
	}
}

func TestWhatJSONHasNoFormForIsNamedWithItsPlace(t *testing.T) {
	for _, c := range []struct {
		value Node
		want  string
	}{
		{mustOf(t, []int8{1}, 1), "a tensor"},
		{Bytes("x"), "bytes"},
		{Float(math.NaN()), "NaN"},
		{Float(math.Inf(-1)), "-Inf"},
		{NDArray{DType: "|u1", Shape: Shape{1}, Data: []byte{1}}, "an array"},
		{Ext{Type: 4}, "a msgpack extension"},
		{Map{{Int(1), Null{}}}, "an int"},
	} {
		b, err := AppendJSON([]byte("kept"), Map{Field("at", List{Null{}, c.value})})
		if !errors.Is(err, ErrTree) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), `$."at"[1]`) || string(b) != "kept" {
			t.Errorf("%v: %q, %v", c.value, b, err)
		}
	}
}

func FuzzJSON(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.0,"x",null,true,{"b":{}}]}`, `-0.0`, `1e-400`, `"\ud800"`, `[[[]]]`, `{"":0,"\u0000":1}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		root, err := ParseJSON(b)
		if err != nil {
			return
		}
		text, err := AppendJSON(nil, root)
		if err != nil {
			t.Fatalf("%q was read, not written: %v", b, err)
		}
		again, err := ParseJSON(text)
		if err != nil || !Equal(root, again) {
			t.Fatalf("%q became %q: %v, %v", b, text, again, err)
		}
	})
}
