package ec

// path is one of the two ways to a producer: the first connection, and the local one. What is sent by one may overtake what was sent by
// the other. So each has a session of its own, which makes its grants its own: a grant is asked for, renewed and ended in the order of
// one path, and an answer about it never means one that was ended before.
type path struct {
	session string
	conn    conn // nil: it is not there; under peer.mu
}

// best is the path of the next request.
func (p *peer) best() *path {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bestLocked()
}

func (p *peer) bestLocked() *path {
	if l := p.local; l != nil && l.up && l.conn != nil {
		return &l.path
	}
	return &p.first
}

// send never waits.
func (p *peer) send(via *path, body []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sendLocked(via, body)
}

// sendLocked sends by the first connection what the local one cannot take any more: nothing will come by that to be overtaken.
func (p *peer) sendLocked(via *path, body []byte) error {
	if via.conn != nil {
		return via.conn.Send(body)
	}
	if p.first.conn != nil {
		return p.first.conn.Send(body)
	}
	return ErrClosed
}
