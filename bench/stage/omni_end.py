"""One end of vLLM-Omni's own connectors, unmodified: answers lines of JSON, as end.go does. Needs interop/peers/omni in PYTHONPATH."""
import base64
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # nothing else says anything there

import omni_boot  # noqa: E402
import msgspec  # noqa: E402
import torch  # noqa: E402

Nixl, Shm, _ = omni_boot.load()
POOL = ThreadPoolExecutor(16)  # their sockets belong to threads
PATIENCE = 60


def value(load):
    leaves = [torch.arange(i, i + load["bytes"] // 4, dtype=torch.float32) for i in range(load["leaves"] or 1)]
    return {"layers": leaves, "meta": {"finished": True}} if load["leaves"] else leaves[0]


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


class End:
    def __init__(self):
        self.connectors, self.load, self.data = {}, None, None

    def open(self, name, connector, host="", put=False, **_):
        if connector == "shm":
            self.connectors[name] = Shm({"stage_id": 1 - put})
        elif put:
            self.connectors[name] = Nixl({"role": "sender", "host": host, "zmq_port": 0})
        else:  # the default of 10 ms loses answers on a busy machine
            self.connectors[name] = Nixl({"role": "receiver", "metadata_query_timeout_ms": 3000})

    def of(self, load):
        if self.load != load:
            self.load, self.data = load, value(load)
        return self.data

    def each(self, in_flight, f, *args):
        start = time.perf_counter()
        out = list(map(f, *args) if in_flight == 1 else POOL.map(f, *args))
        return time.perf_counter() - start, out

    def put(self, name, load, keys, in_flight):
        c, data = self.connectors[name], self.of(load)

        def one(key):
            ok, _, metadata = c.put("0", "1", key, data)
            if not ok:
                raise RuntimeError(f"put {key} failed")
            return metadata

        took, out = self.each(in_flight, one, keys)
        return {"seconds": took, "metadata": [base64.b64encode(msgspec.msgpack.encode(m)).decode() for m in out]}

    def get(self, name, load, keys, in_flight, metadata, check=False, **_):
        c, want = self.connectors[name], self.of(load) if check else None

        def one(key, m):
            end, r = time.monotonic() + PATIENCE, None
            while r is None:
                r = c.get("0", "1", key, m)
                if time.monotonic() > end:
                    raise RuntimeError(f"get {key} failed")
            if check and not equal(r[0], want):
                raise RuntimeError(f"get {key}: wrong value")

        took, _ = self.each(in_flight, one, keys, [msgspec.msgpack.decode(base64.b64decode(m)) for m in metadata])
        return {"seconds": took}


end = End()
for line in sys.stdin:
    q = json.loads(line)
    try:
        answer = getattr(end, q.pop("op"))(**q) or {}
    except Exception as e:
        answer = {"error": repr(e)}
    OUT.write(json.dumps(answer) + "\n")
    OUT.flush()
for c in end.connectors.values():
    c.close()
os._exit(0)
