"""NIXL READs for the comparison with the tcp plane: one process offers memory, another reads it, both driven by lines on stdin.

  nixl_read.py serve BYTES        prints {"metadata": hex, "address": n}, then waits for the end of its input
  nixl_read.py read BYTES         takes that line; then "SIZE" a line, answered by the seconds from post to done

The transport is UCX's choice within UCX_TLS, which the caller sets.
"""
import json
import os
import sys
import time

# NIXL and UCX log to stdout. The answers keep it for themselves.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import torch
from nixl._api import nixl_agent, nixl_agent_config


def main():
    role, size = sys.argv[1], int(sys.argv[2])
    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    memory = torch.zeros(size, dtype=torch.uint8)
    if role == "serve":
        step = 1 << 20
        for at in range(0, size, step):
            memory[at : at + step] = (at // step) % 251 + 1
    address = memory.data_ptr()
    agent.register_memory([(address, size, 0, "")], "DRAM")
    if role == "serve":
        print(json.dumps({"metadata": agent.get_agent_metadata().hex(), "address": address}), file=ANSWERS)
        sys.stdin.read()
        return
    offer = json.loads(sys.stdin.readline())
    peer = agent.add_remote_agent(bytes.fromhex(offer["metadata"]))
    print("ready", file=ANSWERS)
    handles = {}
    for line in sys.stdin:
        n = int(line)
        if n not in handles:
            local = agent.get_xfer_descs([(address, n, 0)], "DRAM")
            remote = agent.get_xfer_descs([(offer["address"], n, 0)], "DRAM")
            handles[n] = agent.initialize_xfer("READ", local, remote, peer)
        handle = handles[n]
        start = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - start
        if state != "DONE" or memory[0] != 1 or memory[n - 1] != ((n - 1) >> 20) % 251 + 1:
            sys.exit(f"READ of {n} bytes: {state}")
        print(took, file=ANSWERS)


main()
