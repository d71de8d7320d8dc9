"""vLLM's own EmbeddingCache for the comparison with ours, driven by lines on stdin.

  pool BLOCKS SIZE       a full pool of entries of SIZE blocks; answers "ok"
  evict N                N times alloc + mark_ready, each of which evicts an entry; answers the seconds of processor time
  pin N                  N times pin_if_ready + unpin, over the keys of the last turn of evict; answers the seconds of processor time
  trace FILE             runs a trace (see trace.go); answers "HITS ALLOCATIONS WHOLE REFUSED"
"""
import os
import sys
import time

# What vLLM and its libraries print goes to stderr. The answers keep stdout for themselves.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import EmbeddingCache

KEYS = 1 << 17


def key(i):
    return "%064x" % (i * 0x9E3779B97F4A7C15 % (1 << 64))


def trace(path):
    with open(path) as f:
        blocks, keys = map(int, f.readline().split())
        size = [int(f.readline()) for _ in range(keys)]
        cache = EmbeddingCache(blocks)
        pinned = {}
        hits = allocations = whole = refused = 0
        for line in f:
            op, number, *rest = line.split()
            if op == "release":
                held = pinned.pop(int(number), None)
                if held is not None:
                    cache.unpin(held)
                continue
            k = int(rest[0])
            name = key(k)
            if cache.pin_if_ready(name) is not None:
                hits += 1
            else:
                entry = cache.alloc(name, size[k])
                if entry is None:
                    refused += 1
                    continue
                allocations += 1
                whole += entry.block_ids[-1] - entry.block_ids[0] + 1 == len(entry.block_ids)
                cache.mark_ready(name)
                cache.pin(name)
            pinned[int(number)] = name
    return f"{hits} {allocations} {whole} {refused}"


def main():
    keys = [key(i) for i in range(KEYS)]
    print("ready", file=ANSWERS)
    cache, size, at, last = None, 0, 0, 0
    for line in sys.stdin:
        op, *args = line.split()
        if op == "pool":
            blocks, size = map(int, args)
            cache, at = EmbeddingCache(blocks), 0
            while at < blocks // size:
                cache.alloc(keys[at], size)
                cache.mark_ready(keys[at])
                at += 1
            answer = "ok"
        elif op == "evict":
            turn = [keys[(at + i) % KEYS] for i in range(int(args[0]))]
            at += len(turn)
            last = turn
            start = time.process_time()
            for k in turn:
                cache.alloc(k, size)
                cache.mark_ready(k)
            answer = time.process_time() - start
        elif op == "pin":
            n = int(args[0])
            turn = [last[-1 - i % min(len(last), 32)] for i in range(n)]
            start = time.process_time()
            for k in turn:
                cache.pin_if_ready(k)
                cache.unpin(k)
            answer = time.process_time() - start
        elif op == "trace":
            answer = trace(args[0])
        print(answer, file=ANSWERS)


main()
