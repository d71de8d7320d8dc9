package wire

// PeekClaim finds the generation and the claim in metadata that DecodeReply refuses, so that the claim can still be ended. It reads
// as far as b is well formed; what is not there is the zero ID.
func PeekClaim(b []byte) (generation, claim ID) {
	if len(b) > MaxReply {
		return ID{}, ID{}
	}
	r := newReader(b)
	n, err := r.fields()
	if err != nil {
		return ID{}, ID{}
	}
	for range n {
		name, err := r.next()
		if err != nil {
			break
		}
		switch string(name) {
		case fieldGeneration:
			generation, err = r.id()
		case fieldClaim:
			claim, err = r.claim()
		default:
			err = r.skip()
		}
		if err != nil {
			break
		}
	}
	return generation, claim
}
