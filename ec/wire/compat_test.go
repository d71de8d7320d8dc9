package wire

import "testing"

func TestCompatHashIsThatOfThePeers(t *testing.T) {
	for _, c := range readGolden(t).CompatHash {
		got := Compat{c.VLLMVersion, c.Model, c.Dtype, c.BlockBytes}
		if j := string(got.appendJSON(nil)); j != c.JSON {
			t.Errorf("%s, want %s", j, c.JSON)
		}
		if h := got.Hash(); h != c.SHA256 {
			t.Errorf("%s: %s, want %s", c.JSON, h, c.SHA256)
		}
	}
}

// The right side is what Python 3.11 prints for json.dumps(os.fsdecode(model)): DEL is escaped too.
func TestCompatTextIsEscapedAsPythonDoes(t *testing.T) {
	for model, want := range map[string]string{
		"plain/Name-1.5_x":           `"plain/Name-1.5_x"`,
		"<a&b>'":                     `"<a&b>'"`,
		"\"\\/":                      `"\"\\/"`,
		"\n\r\t\b\f":                 `"\n\r\t\b\f"`,
		"\x00\x01\x0b\x1f\x7f":       `"\u0000\u0001\u000b\u001f\u007f"`,
		"\u00fc\u4e2d\u2028\ufffd":   `"\u00fc\u4e2d\u2028\ufffd"`,
		"\U0001f600\U00010000":       `"\ud83d\ude00\ud800\udc00"`,
		"\uffff":                     `"\uffff"`,
		"bad \xff\xc3( \xe2\x82":     `"bad \udcff\udcc3( \udce2\udc82"`,
		"half a pair \xed\xa0\x80":   `"half a pair \udced\udca0\udc80"`,
		"too long a form \xc0\xaf":   `"too long a form \udcc0\udcaf"`,
		"over Unicode \xf4\x90\x80!": `"over Unicode \udcf4\udc90\udc80!"`,
	} {
		if got := string(appendJSONString(nil, model)); got != want {
			t.Errorf("%q: %s, want %s", model, got, want)
		}
	}
}

func TestCompatDiffNamesTheFieldsAndBothValues(t *testing.T) {
	a := Compat{"0.32.0", "tiny-mm", "torch.bfloat16", 2048}
	if d := a.Diff(a); d != "" {
		t.Error(d)
	}
	b := a
	b.Dtype, b.BlockBytes = "torch.float16", 4096
	want := `dtype: "torch.bfloat16" here, "torch.float16" there; block_size_bytes: 2048 here, 4096 there`
	if d := a.Diff(b); d != want {
		t.Errorf("%s, want %s", d, want)
	}
	b = a
	b.Model, b.VLLMVersion = "tiny\n", ""
	want = `vllm_version: "0.32.0" here, "" there; model: "tiny-mm" here, "tiny\n" there`
	if d := a.Diff(b); d != want {
		t.Errorf("%s, want %s", d, want)
	}
}
