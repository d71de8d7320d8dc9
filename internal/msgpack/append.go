package msgpack

import "github.com/tinylib/msgp/msgp"

// Count is how many of a map's optional fields are there.
func Count(present ...bool) (n uint32) {
	for _, p := range present {
		if p {
			n++
		}
	}
	return n
}

// AppendInt writes the shortest form as the peers do: unsigned where it can be (msgp.AppendInt64 would write 128 as an int16).
func AppendInt(b []byte, v int64) []byte {
	if v >= 0 {
		return msgp.AppendUint64(b, uint64(v))
	}
	return msgp.AppendInt64(b, v)
}

// AppendStr writes a field of text.
func AppendStr(b []byte, name, v string) []byte {
	return msgp.AppendString(msgp.AppendString(b, name), v)
}

// OptionalStr writes a field of text, unless it is empty.
func OptionalStr(b []byte, name, v string) []byte {
	if v == "" {
		return b
	}
	return AppendStr(b, name, v)
}

// OptionalBin writes a field of bytes, unless there are none.
func OptionalBin(b []byte, name string, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return msgp.AppendBytes(msgp.AppendString(b, name), v)
}

// OptionalUint writes a field of a number, unless it is 0.
func OptionalUint(b []byte, name string, v uint64) []byte {
	if v == 0 {
		return b
	}
	return msgp.AppendUint64(msgp.AppendString(b, name), v)
}

// OptionalInt writes a field of a number, unless it is 0.
func OptionalInt(b []byte, name string, v int64) []byte {
	if v == 0 {
		return b
	}
	return AppendInt(msgp.AppendString(b, name), v)
}

// OptionalTrue writes a field that is true, and none that is false.
func OptionalTrue(b []byte, name string, v bool) []byte {
	if !v {
		return b
	}
	return msgp.AppendBool(msgp.AppendString(b, name), true)
}
