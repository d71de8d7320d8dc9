package tcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// The protocol. Both directions send frames: a header of 16 bytes, little endian, and what its length says.
//
//	0  4  magic "FTCP"
//	4  1  version
//	5  1  kind
//	6  2  status, 0 in requests
//	8  8  length of what follows
//
//	request  body                                                 answer
//	hello    instance [16], registration u64                      welcome
//	read     token [16], read id u64, n x (offset u64, length u64)  data: exactly the bytes of the spans, in order
//	commit   token [16], read id u64, message                     done
//
// An answer with a status other than 0 has a text for people instead. One request is outstanding on a connection at a time. The
// reader sends commit once all parts of a READ, which may have come by several connections, are in its memory. The READ is a
// success only if commit is answered with status 0: the producer then found the grant live after the last byte had been read.
const (
	protocolVersion = 1
	headerBytes     = 16
	tokenBytes      = 16
	spanBytes       = 16
	helloBytes      = 16 + 8
	requestBytes    = tokenBytes + 8 // the fixed part of read and commit
	maxText         = 512            // of a refusal
	maxBody         = requestBytes + transfer.MaxSpans*spanBytes
)

var magic = [4]byte{'F', 'T', 'C', 'P'}

type kind uint8

const (
	kindHello kind = 1 + iota
	kindWelcome
	kindRead
	kindData
	kindCommit
	kindDone
)

// status is the outcome that an answer carries.
type status uint16

const (
	statusOK         status = 0
	statusDenied     status = 1 // no such grant, or the spans are not in it
	statusUnknown    status = 2 // no such instance or registration here: the peer restarted or withdrew the memory
	statusBadRequest status = 3
)

// Input that is not the protocol: the connection is dropped. A version that differs is said to the other side, whose header has
// the same first bytes in every version.
var (
	errGarbage = errors.New("tcp: not this protocol")
	errVersion = fmt.Errorf("%w: another version", errGarbage)
)

type header struct {
	kind   kind
	status status
	length int64
}

func (h header) append(b []byte) []byte {
	b = append(b, magic[:]...)
	b = append(b, protocolVersion, byte(h.kind))
	b = binary.LittleEndian.AppendUint16(b, uint16(h.status))
	return binary.LittleEndian.AppendUint64(b, uint64(h.length))
}

func parseHeader(b *[headerBytes]byte) (header, error) {
	if !bytes.Equal(b[:4], magic[:]) {
		return header{}, fmt.Errorf("%w: first bytes %q", errGarbage, b[:4])
	}
	if b[4] != protocolVersion {
		return header{}, fmt.Errorf("%w: the peer speaks %d, this is %d", errVersion, b[4], protocolVersion)
	}
	h := header{kind: kind(b[5]), status: status(binary.LittleEndian.Uint16(b[6:])), length: int64(binary.LittleEndian.Uint64(b[8:]))}
	if h.length < 0 {
		return header{}, fmt.Errorf("%w: length %d", errGarbage, uint64(h.length))
	}
	return h, nil
}

func readHeader(r io.Reader) (header, error) {
	var b [headerBytes]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return header{}, err
	}
	return parseHeader(&b)
}

// readBody reads n bytes, at most limit, into buf or a larger buffer that grows only as fast as bytes come in.
func readBody(r io.Reader, buf []byte, n int64, limit int) ([]byte, error) {
	if n > int64(limit) {
		return nil, fmt.Errorf("%w: a body of %d bytes, at most %d", errGarbage, n, limit)
	}
	const step = 16 << 10
	buf = buf[:0]
	for int64(len(buf)) < n {
		at := len(buf)
		m := int(min(n-int64(at), step))
		if cap(buf) < at+m {
			buf = append(buf, make([]byte, m)...)
		} else {
			buf = buf[:at+m]
		}
		if _, err := io.ReadFull(r, buf[at:]); errors.Is(err, io.EOF) {
			return nil, io.ErrUnexpectedEOF
		} else if err != nil {
			return nil, err
		}
	}
	return buf, nil
}

// endpointID says which registration of which process a connection is for.
type endpointID struct {
	instance     [16]byte // random at each tcp.New
	registration uint64
}

func (e endpointID) append(b []byte) []byte {
	b = append(b, e.instance[:]...)
	return binary.LittleEndian.AppendUint64(b, e.registration)
}

func parseHello(b []byte) (e endpointID, err error) {
	if len(b) != helloBytes {
		return e, fmt.Errorf("%w: hello of %d bytes", errGarbage, len(b))
	}
	copy(e.instance[:], b)
	e.registration = binary.LittleEndian.Uint64(b[16:])
	return e, nil
}

type token [tokenBytes]byte

// request is a read or a commit. Its spans are of a read, its message of a commit.
type request struct {
	token   token
	readID  uint64
	spans   []region.Span
	message []byte
}

func (q request) append(k kind, b []byte) []byte {
	b = header{kind: k, length: int64(requestBytes + len(q.spans)*spanBytes + len(q.message))}.append(b)
	b = append(b, q.token[:]...)
	b = binary.LittleEndian.AppendUint64(b, q.readID)
	for _, s := range q.spans {
		b = binary.LittleEndian.AppendUint64(b, uint64(s.Offset))
		b = binary.LittleEndian.AppendUint64(b, uint64(s.Length))
	}
	return append(b, q.message...)
}

// parseRequest decodes the body of a read or commit. The message is a copy.
func parseRequest(k kind, b []byte) (q request, err error) {
	if len(b) < requestBytes {
		return q, fmt.Errorf("%w: request of %d bytes", errGarbage, len(b))
	}
	copy(q.token[:], b)
	q.readID = binary.LittleEndian.Uint64(b[tokenBytes:])
	b = b[requestBytes:]
	if k == kindCommit {
		if len(b) > transfer.MaxNotification {
			return q, fmt.Errorf("%w: message of %d bytes", errGarbage, len(b))
		}
		q.message = bytes.Clone(b)
		return q, nil
	}
	if len(b)%spanBytes != 0 {
		return q, fmt.Errorf("%w: %d bytes of spans", errGarbage, len(b))
	}
	q.spans = make([]region.Span, 0, len(b)/spanBytes)
	for ; len(b) > 0; b = b[spanBytes:] {
		q.spans = append(q.spans, region.Span{
			Offset: int64(binary.LittleEndian.Uint64(b)), Length: int64(binary.LittleEndian.Uint64(b[8:])),
		})
	}
	return q, nil
}
