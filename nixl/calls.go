package nixl

// handle is an opaque pointer of the C library. 0 is none.
type handle = uintptr

// calls is the seam between the objects of this package and what executes them: the C library (capi) or the fake (Fake).
// Implementations keep no Go memory after a call returns, and return copies.
type calls interface {
	createAgent(name string, c AgentConfig) (handle, Status)
	destroyAgent(agent handle)
	plugins(agent handle) ([]string, Status)
	createBackend(agent handle, kind string, params map[string]string) (handle, Status)
	backendParams(agent, backend handle) (map[string]string, Status)
	destroyBackend(backend handle)

	register(agent handle, t MemoryType, ranges []Range, backends []handle) (handle, Status)
	deregister(agent, registration handle) Status

	localMetadata(agent handle) ([]byte, Status)
	loadPeer(agent handle, metadata []byte) (string, Status)
	invalidatePeer(agent handle, name string) Status
	connect(agent handle, peer string, backends []handle) Status
	knows(agent handle, peer string, t MemoryType, ranges []Range) Status // no ranges: the peer at all

	prepare(agent handle, peer string, t MemoryType, ranges []Range, backends []handle) (handle, Status)
	releasePrepared(agent, prepared handle)

	createRequest(agent handle, r requestArgs) (handle, Status)
	makeRequest(agent handle, r preparedArgs) (handle, Status)
	post(agent, request handle) Status
	status(agent, request handle) Status
	releaseRequest(agent, request handle) (done bool) // false: it is still there, and can be tried again
	requestBackend(agent, request handle, among []handle) (handle, Status)
	estimate(agent, request handle) (Estimate, Status)
	telemetry(agent, request handle) (Telemetry, Status)

	unmap(b []byte) error

	notifications(agent handle) ([]Notification, Status)
	notify(agent handle, peer string, message []byte) Status
}

// requestArgs describe a request over explicit ranges.
type requestArgs struct {
	operation     Operation
	peer          string
	localType     MemoryType
	remoteType    MemoryType
	local, remote []Range
	notification  []byte // nil: none
	backend       handle // 0: the library chooses
}

// preparedArgs describe a request over indices of prepared lists.
type preparedArgs struct {
	operation                   Operation
	local, remote               handle
	localIndices, remoteIndices []int32
	notification                []byte
	backend                     handle
}
