package control

/*
#cgo pkg-config: libzmq
#cgo noescape ferry_recv
#cgo nocallback ferry_recv
#cgo noescape ferry_send
#cgo nocallback ferry_send
#cgo noescape ferry_peer_address
#cgo nocallback ferry_peer_address
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zmq.h>

// Bodies from here on are counted in bytes while libzmq holds them. libzmq copies smaller messages into buffers of this size
// before it writes, and its own limit, which counts messages, bounds them well enough.
#define FERRY_LARGE 8192

// ferry_msg holds a message until the next one is received. Parts beyond the third are read and thrown away.
typedef struct {
	zmq_msg_t part[3];
	void *data[3];
	size_t size[3];
	int open; // parts in use
	int fd;   // descriptor of the connection, -1 if unknown
	uint64_t wire; // bytes of its frames, all but the first
} ferry_msg;

static void ferry_clear(ferry_msg *m)
{
	for (int i = 0; i < m->open; i++)
		zmq_msg_close(&m->part[i]);
	m->open = 0;
}

// Receives one whole message without waiting. Returns its number of parts, or -errno.
static int ferry_recv(void *socket, ferry_msg *m)
{
	ferry_clear(m);
	m->fd = -1;
	m->wire = 0;
	for (int n = 0;; n++) {
		int i = n < 3 ? n : 2;
		zmq_msg_t *p = &m->part[i];
		if (n < 3) {
			zmq_msg_init(p);
			m->open = n + 1;
		}
		int rc;
		do
			rc = zmq_msg_recv(p, socket, ZMQ_DONTWAIT);
		while (rc < 0 && errno == EINTR);
		if (rc < 0)
			return -errno;
		m->data[i] = zmq_msg_data(p);
		m->size[i] = zmq_msg_size(p);
		if (n > 0)
			m->wire += m->size[i] + (m->size[i] > 255 ? 9 : 2);
		if (!zmq_msg_more(p)) {
			m->fd = zmq_msg_get(p, ZMQ_SRCFD);
			return n + 1;
		}
	}
}

static const char *ferry_peer_address(ferry_msg *m)
{
	return zmq_msg_gets(&m->part[m->open - 1], "Peer-Address");
}

static int ferry_part(void *socket, const void *data, size_t size, int flags)
{
	int rc;
	do
		rc = zmq_send(socket, data, size, flags | ZMQ_DONTWAIT);
	while (rc < 0 && errno == EINTR);
	return rc < 0 ? -errno : 0;
}

// ferry_flow counts the bytes of large bodies that libzmq holds for a destination, or for all of a loop: then it is the whole of others.
// It lives until its owner, all bodies and all its parts are gone.
typedef struct ferry_flow {
	struct ferry_flow *whole; // NULL if it is part of none
	int64_t bytes;
	int64_t refs;
} ferry_flow;

static void ferry_flow_hold(ferry_flow *f) { __atomic_add_fetch(&f->refs, 1, __ATOMIC_RELAXED); }

static void ferry_flow_drop(ferry_flow *f)
{
	while (f && __atomic_sub_fetch(&f->refs, 1, __ATOMIC_ACQ_REL) == 0) {
		ferry_flow *whole = f->whole;
		free(f);
		f = whole;
	}
}

static void ferry_flow_add(ferry_flow *f, int64_t bytes)
{
	for (; f; f = f->whole)
		__atomic_add_fetch(&f->bytes, bytes, __ATOMIC_RELAXED);
}

// ferry_body is a large body in libzmq's hands. Its bytes follow it, or lie in a mapping.
typedef struct {
	ferry_flow *flow;
	int64_t cost; // bytes of memory
	void *map;    // NULL: none
	size_t map_size;
} ferry_body;

static void ferry_body_drop(ferry_body *b)
{
	if (b->map)
		munmap(b->map, b->map_size);
	free(b);
}

// Called by libzmq, on any of its threads, when a body has been written to the connection or thrown away.
static void ferry_body_free(void *data, void *hint)
{
	ferry_body *b = hint;
	(void)data;
	ferry_flow_add(b->flow, -b->cost);
	ferry_flow_drop(b->flow);
	ferry_body_drop(b);
}

static int ferry_body_give(zmq_msg_t *msg, ferry_flow *flow, ferry_body *b, void *data, size_t size, int64_t cost)
{
	b->flow = flow;
	b->cost = cost;
	if (zmq_msg_init_data(msg, data, size, ferry_body_free, b) < 0) {
		ferry_body_drop(b);
		return -ENOMEM;
	}
	ferry_flow_hold(flow);
	ferry_flow_add(flow, cost);
	return 0;
}

// Makes room for a large body, which is copied once it is clear that libzmq takes the message.
static int ferry_body_new(zmq_msg_t *msg, ferry_flow *flow, size_t size)
{
	ferry_body *b = malloc(sizeof *b + size);
	if (!b)
		return -ENOMEM;
	b->map = NULL;
	return ferry_body_give(msg, flow, b, b + 1, size, (int64_t)size);
}

// ferry_tail is the end of a body: all of a file in memory. fd is -1 if there is none.
typedef struct {
	int fd;
	size_t size;
	int64_t cost; // of mapping it, in bytes of memory
} ferry_tail;

// Makes a body whose end is a file in memory: its pages, and in front of them pages with room for the head, which ends where they begin.
static int ferry_body_map(zmq_msg_t *msg, ferry_flow *flow, size_t head_size, ferry_tail tail)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (head_size + page - 1) / page * page;
	ferry_body *b = malloc(sizeof *b);
	if (!b)
		return -ENOMEM;
	b->map_size = room + tail.size;
	b->map = mmap(NULL, b->map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (b->map == MAP_FAILED)
		b->map = NULL;
	char *at = (char *)b->map + room;
	if (!b->map || mmap(at, tail.size, PROT_READ, MAP_SHARED | MAP_FIXED, tail.fd, 0) == MAP_FAILED) {
		ferry_body_drop(b);
		return -ENOMEM;
	}
	return ferry_body_give(msg, flow, b, at - head_size, head_size + tail.size, tail.cost);
}

// Makes the message for a body. copy says that the tail is to be copied, as it cannot be mapped: the process has too many mappings.
static int ferry_message(zmq_msg_t *msg, ferry_flow *flow, size_t head_size, ferry_tail tail, int *copy)
{
	size_t size = head_size + tail.size;
	*copy = 0;
	if (tail.fd >= 0) {
		if (ferry_body_map(msg, flow, head_size, tail) == 0)
			return 0;
		*copy = 1;
	}
	return size < FERRY_LARGE ? zmq_msg_init_size(msg, size) : ferry_body_new(msg, flow, size);
}

// Reads all of a file in memory, which is sealed and so never too short.
static void ferry_tail_read(char *to, ferry_tail tail)
{
	for (size_t at = 0; at < tail.size;) {
		ssize_t n = pread(tail.fd, to + at, tail.size - at, (off_t)at);
		if (n > 0)
			at += (size_t)n;
	}
}

// Sends [id, "", body], or ["", body] if there is no id, without waiting; the body is head and tail. Only the first part can be refused,
// and libzmq has then taken nothing. When the connection breaks between the parts the message is lost, as it is when it breaks right
// after them.
static int ferry_send(void *socket, ferry_flow *flow, const void *id, size_t id_size, const void *head, size_t head_size, ferry_tail tail)
{
	zmq_msg_t msg;
	int copy;
	int rc = ferry_message(&msg, flow, head_size, tail, &copy);
	if (rc < 0)
		return -ENOMEM;
	int first = ferry_part(socket, id, id_size, ZMQ_SNDMORE); // the id or, without one, the empty part
	if (first == 0 && id_size > 0)
		ferry_part(socket, "", 0, ZMQ_SNDMORE);
	if (first == 0) {
		char *data = zmq_msg_data(&msg);
		if (head_size > 0)
			memcpy(data, head, head_size);
		if (copy)
			ferry_tail_read(data + head_size, tail);
		do
			rc = zmq_msg_send(&msg, socket, ZMQ_DONTWAIT);
		while (rc < 0 && errno == EINTR);
	}
	if (first < 0 || rc < 0)
		zmq_msg_close(&msg);
	return first;
}
*/
import "C"

import (
	"errors"
	"reflect"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/pebbe/zmq4"
)

// The hot path calls libzmq directly, one cgo call a message. The calls of pebbe/zmq4, about six a frame, took 1,250 ns and nine
// allocations to send and receive a message of three frames; these take 350 ns and none.

// handle is the pointer that libzmq knows a socket by. pebbe/zmq4 keeps it in a field that it does not export.
func handle(z *zmq4.Socket) (unsafe.Pointer, error) {
	f := reflect.ValueOf(z).Elem().FieldByName("soc")
	if f.Kind() != reflect.UnsafePointer || f.IsNil() {
		return nil, errors.New("control: this version of pebbe/zmq4 keeps no handle in Socket.soc: build with the one that go.mod names")
	}
	return f.UnsafePointer(), nil
}

// zeroed takes memory of C that is never nil: cgo's malloc, other than its calloc, ends the process when there is none.
func zeroed(size C.size_t) unsafe.Pointer {
	p := C.malloc(size)
	C.memset(p, 0, size)
	return p
}

// trim asks C's allocator to give what is free back to the kernel.
func trim() { C.malloc_trim(0) }

// inbound is where a loop receives. Its memory is C's, and a part stays in place until the next recv. Owner only.
type inbound struct{ m *C.ferry_msg }

func newInbound() inbound {
	m := (*C.ferry_msg)(zeroed(C.sizeof_ferry_msg))
	return inbound{m}
}

func (in inbound) free() {
	C.ferry_clear(in.m)
	C.free(unsafe.Pointer(in.m))
}

// recv receives one message from the socket and returns its number of parts. syscall.EAGAIN says that there is none.
func (in inbound) recv(socket unsafe.Pointer) (parts int, errno syscall.Errno) {
	n := C.ferry_recv(socket, in.m)
	if n < 0 {
		return 0, syscall.Errno(-n)
	}
	return int(n), 0
}

// part gives part i, of the first three. It is valid until the next recv.
func (in inbound) part(i int) []byte {
	return unsafe.Slice((*byte)(in.m.data[i]), int(in.m.size[i]))
}

// fd is the descriptor of the connection that the message came by. It names a connection only together with the monitor's events.
func (in inbound) fd() int { return int(in.m.fd) }

// wire is how many bytes of the connection the message was, if the first part is the id that a ROUTER puts in front.
func (in inbound) wire() int64 { return int64(in.m.wire) }

// peer is the IP address that the message came from, "" if libzmq does not say.
func (in inbound) peer() string {
	if s := C.ferry_peer_address(in.m); s != nil {
		return C.GoString(s)
	}
	return ""
}

// large is the least size of a body that a flow counts.
const large = C.FERRY_LARGE

// flow counts the bytes of large bodies that libzmq holds for one destination, or for all of a loop. Its zero value, before
// there is a socket, counts none.
type flow struct{ f *C.ferry_flow }

// newFlow makes a flow that is also counted in whole, unless that is zero. The caller must drop it.
func newFlow(whole flow) flow {
	f := (*C.ferry_flow)(zeroed(C.sizeof_ferry_flow))
	f.refs = 1
	if whole.f != nil {
		f.whole = whole.f
		C.ferry_flow_hold(whole.f)
	}
	return flow{f}
}

// held is how many bytes libzmq holds.
func (f flow) held() int64 {
	if f.f == nil {
		return 0
	}
	return atomic.LoadInt64((*int64)(unsafe.Pointer(&f.f.bytes)))
}

// drop gives the flow up; libzmq may still hold bodies.
func (f flow) drop() { C.ferry_flow_drop(f.f) }

// send hands [id, "", body] to libzmq, which copies it but for what is shared; without an id, ["", body]. syscall.EAGAIN says that there
// is no room, syscall.EHOSTUNREACH that a ROUTER knows nobody by that id.
func send(socket unsafe.Pointer, f flow, id string, p parcel) syscall.Errno {
	tail := C.ferry_tail{fd: -1}
	if p.tail != nil {
		tail = C.ferry_tail{fd: C.int(p.tail.fd), size: C.size_t(p.tail.size), cost: C.int64_t(p.cost())}
	}
	rc := C.ferry_send(socket, f.f, unsafe.Pointer(unsafe.StringData(id)), C.size_t(len(id)),
		unsafe.Pointer(unsafe.SliceData(p.head)), C.size_t(len(p.head)), tail)
	runtime.KeepAlive(p.tail)
	return syscall.Errno(-rc)
}
