package wire

// PeekClaim finds the generation and the claim in metadata that DecodeReply refuses, so that the claim can still be ended. It reads
// as far as b is well formed; what is not there is the zero ID.
func PeekClaim(b []byte) (generation, claim ID) {
	if len(b) > MaxReply {
		return ID{}, ID{}
	}
	r := newReader(b, 0)
	for name := range r.Fields() {
		switch string(name) {
		case fieldGeneration:
			generation = r.id()
		case fieldClaim:
			claim = r.claim()
		default:
			r.Skip()
		}
	}
	return generation, claim
}
