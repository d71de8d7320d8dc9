#!/usr/bin/env python3
"""vLLM's real EC consumer, stepped all the time as an engine does, and told on stdin what its users ask for.

A JSON object a line on stdin:
  {"pull": {"<mm_hash>": size, ...}, "peer": "HOST:PORT"}   a request for each; a line {"mm_hash", "result", "good", "ms"} for each when it
        has an end: pulled (good: the bytes are the entry's pattern), unavailable, fallback. "params" in place of "peer": ec_transfer_params,
        taken as they are
  {"abort": ["<mm_hash>", ...]}   end the requests for these keys without waiting; answered {"aborted": n}
  {"evict": true}                 forget all local copies; answered {"evicted": n}
  {"state": true}                 answered {"state": {...}, "pulls": {"<mm_hash>": {"blocks": [...], "posted": bool}, ...}}: of those that are not over, the
        blocks to fill, and whether the READ is posted
It ends at the end of stdin. Exit status 70: an exception left the scheduler's step, which would end an engine."""
import argparse, json, os, select, sys, time
import ec_common as C

class Live:
    def __init__(self, a):
        from consumer_lib import Cons  # not before C.speak
        self.c = Cons(region=a.region, hidden=a.hidden, width=a.width, dtype=a.dtype, model=a.model, ack_timeout=a.ack_timeout,
                      engine_id=a.engine_id, port=a.port)
        if a.compat: self.c.sch._compat_hash = a.compat
        self.waiting = {}  # request id -> (hash, request, start, size)

    def command(self, m):
        if "pull" in m:
            host, port = m["peer"].rsplit(":", 1) if "peer" in m else ("", 0)
            for h, size in m["pull"].items():
                q = self.c.request(h, size, host, int(port), **m.get("params", {}).get(h, {}))
                self.waiting[q.request_id] = (h, q, time.perf_counter(), size)
        elif "abort" in m:
            ids = [i for i, (h, *_) in self.waiting.items() if h in m["abort"]]
            for i in ids: self.c.conn.request_finished(self.waiting.pop(i)[1])
            C.emit({"aborted": len(ids)})
        elif "evict" in m:
            n = len(self.c.sch._cache._entries)
            self.c.evict_all()
            C.emit({"evicted": n - len(self.c.sch._cache._entries)})
        elif "state" in m:
            pulls = [x for s in self.c.sch._sessions.values() for x in s._xfers.values()]
            C.emit({"state": C.cache_state(self.c.conn),
                    "pulls": {x.mm_hash: {"blocks": list(x.block_indices), "posted": x.transfer_handle is not None} for x in pulls}})
        else: raise ValueError(f"unknown command {m}")

    def end(self, i, result, good=None):
        h, q, t0, _ = self.waiting.pop(i)
        self.c.conn.request_finished(q)
        C.emit({"mm_hash": h, "result": result, "good": good, "ms": round((time.perf_counter() - t0) * 1e3, 3)})

    def step(self):
        out, bad = self.c.step([q for _, q, *_ in self.waiting.values()])
        for i, load in out.items():
            if load is None: self.end(i, "fallback"); continue
            tid, ids, _ = load
            h, _, _, size = self.waiting[i]
            good = bool((self.c.bytes_of(ids)[:size] == C.pattern(h, size)).all())
            self.c.conn.update_connector_output(C.worker_done(loads=[tid]))
            self.end(i, "pulled", good)
        for i in list(bad):
            if i in self.waiting: self.end(i, "unavailable")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--region", default="256M"); p.add_argument("--hidden", type=int, default=1024)
    p.add_argument("--compat", default=None); p.add_argument("--step-ms", type=float, default=1.0)
    p.add_argument("--model", default="tiny-mm"); p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--width", type=int, default=None, help="of a row, where it is not --hidden: the last block may be part filled")
    p.add_argument("--ack-timeout", type=float, default=None, help="consumer_ack_timeout_s")
    p.add_argument("--version", type=int, default=None, help="connector_version to send")
    p.add_argument("--speaks", type=int, default=None, help="be a build of that protocol version")
    p.add_argument("--engine-id", default=None, help="also the name of its NIXL agent")
    p.add_argument("--port", type=int, default=None, help="be a producer too, that listens there")
    p.add_argument("--later", action="store_true", help="import everything, and begin with the first line on stdin")
    a = p.parse_args()
    C.speak(a.speaks)
    if a.later:
        import consumer_lib, vllm.distributed.ec_transfer.ec_connector.factory, vllm.distributed.nixl_utils  # noqa: F401
        C.make_request("first", [("first", 1)])
        os.read(0, 1)
    if a.version is not None:
        import functools
        from vllm.distributed.ec_transfer.ec_connector.cpu import session as S
        S.XferReq = functools.partial(S.XferReq, connector_version=a.version)
    live = Live(a)
    C.emit({"ready": True, "compat_hash": live.c.sch._compat_hash, "pid": os.getpid(), "shm": live.c.sch._region._mmap_path})
    os.set_blocking(0, False)
    buf = b""
    while True:
        live.step()
        select.select([0], [], [], a.step_ms / 1e3)
        try: d = os.read(0, 1 << 20)
        except BlockingIOError: continue
        if d == b"": break
        buf += d
        while b"\n" in buf:
            line, buf = buf.split(b"\n", 1)
            live.command(json.loads(line))
    live.c.conn.shutdown()
    C.bye()


if __name__ == "__main__":
    try: main()
    except SystemExit: raise
    except BaseException:      # what would take the engine core down
        import traceback; traceback.print_exc(); C.bye(70)
