"""An unmodified vLLM producer or consumer (ECCPUConnector's scheduler side) with an engine step of 1 ms, driven by lines on stdin.

  pull_peer.py producer REGION HIDDEN   add BYTES KEY...                 saves entries; answered by their ec_transfer_params
  pull_peer.py consumer REGION HIDDEN   pull HOST PORT BYTES CHECK KEY.. pulls them at once; answered by the seconds until the scheduler has all

Bytes are compared if CHECK is 1, after the clock has stopped. What was pulled is forgotten before the answer. Needs interop/peers/vllm
in PYTHONPATH.
"""
import json
import os
import sys
import time

import ec_common as C  # first: it keeps stdout for the answers
import torch
from consumer_lib import Cons

STEP = 1e-3


def answer(line):
    C.OUT.write(line + "\n")
    C.OUT.flush()


class Producer:
    def __init__(self, region, hidden):
        config = C.make_config("ec_producer", model="tiny-mm", dtype="bfloat16", hidden=hidden, region_bytes=region)
        self.block = 2 * hidden
        self.conn = C.make_connector(config, "127.0.0.1", C.free_port())
        self.blocks = self.conn.connector_scheduler._region.blocks
        self.requests = 0

    def add(self, size, *keys):
        params = {}
        for key in keys:
            self.requests += 1
            request = C.make_request(f"save-{self.requests}", [(key, int(size) // self.block)])
            self.conn.update_state_after_alloc(request, 0)
            saves = self.conn.build_connector_meta(None).saves
            for k, ids in saves.items():
                bytes_ = C.pattern(k, len(ids) * self.block).view("int8")
                self.blocks[torch.tensor(ids)] = torch.from_numpy(bytes_).view(len(ids), self.block)
            self.conn.update_connector_output(C.worker_done(saves=saves))
            params.update(self.conn.request_finished(request)[1])
        return json.dumps(params)

    def serve(self):
        """Steps all the time, as an engine does, and looks at its input now and then."""
        os.set_blocking(0, False)
        text, steps = b"", 0
        while True:
            self.conn.build_connector_meta(None)
            time.sleep(STEP)
            steps += 1
            if steps % 16:
                continue
            try:
                more = os.read(0, 1 << 16)
            except BlockingIOError:
                continue
            if not more:
                return
            text += more
            while b"\n" in text:
                line, text = text.split(b"\n", 1)
                answer(self.add(*line.decode().split()[1:]))

    def close(self):
        self.blocks = None  # or the pool cannot be unmapped
        self.conn.shutdown()


class Consumer:
    def __init__(self, region, hidden):
        self.c = Cons(region=str(region), hidden=hidden)
        self.conn = self.c.conn

    def pull(self, host, port, size, check, *keys):
        waiting = [self.c.request(k, int(size), host, int(port)) for k in keys]
        loads = []
        start = time.perf_counter()
        while waiting:
            ready, unavailable = self.c.step(waiting)
            if unavailable:
                raise RuntimeError(f"{len(unavailable)} of {len(keys)} are unavailable")
            for request in waiting:
                if request.request_id in ready:
                    loads.append((request, ready[request.request_id]))
            waiting = [r for r in waiting if r.request_id not in ready]
            if waiting:
                time.sleep(STEP)
        took = time.perf_counter() - start
        for request, (load, ids, _) in loads:
            key = request.mm_features[0].identifier
            if check == "1" and not (self.c.bytes_of(ids) == C.pattern(key, int(size))).all():
                raise RuntimeError(f"{key}: wrong bytes")
            self.conn.update_connector_output(C.worker_done(loads=[load]))
            self.conn.request_finished(request)
        self.c.evict_all()
        return str(took)

    def serve(self):
        for line in sys.stdin:
            answer(self.pull(*line.split()[1:]))

    def close(self):
        self.conn.shutdown()


def main():
    role, region, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    peer = {"producer": Producer, "consumer": Consumer}[role](region, hidden)
    C.make_request("warm", [("w", 1)])
    answer("ready")
    peer.serve()
    peer.close()
    C.bye()  # without exit handlers: NIXL's crash


main()
