#!/usr/bin/env python3
"""Real NixlConnectors to order: importing them takes 10-15 s, so this is done once, and each peer is a fork.

  omni_live.py SOCKET

Listens on the unix socket SOCKET and says "ready" on stdout. Each connection to it is a peer process of its own, which says its pid
first, then answers each line of JSON with one. It ends when its connection does, at once and without Python's exit handlers. This
process ends at the end of its stdin, and its peers with it.

  {"op":"open","config":{..},"env":{..},"host":PID}           a connector; before it, environment, and the network and mounts of PID
  {"op":"put","key":K,"value":V | "case":C}                   ok, size, metadata (hex of its msgpack)
  {"op":"get","key":K,"metadata":HEX|null,"wait":S,"deadline":S,"brief":BOOL}
                      value as describe() has it, size, tries; again every 50 ms up to wait
  {"op":"puts","key":PREFIX,"first":I,"count":N,"bytes":B}    uint8 tensors PREFIX0, PREFIX1, ..; all bytes of number I are I mod 251
  {"op":"gets","key":PREFIX,"first":I,"count":N,"endpoint":[HOST,PORT]}   how many of those came, and were whole
  {"op":"stop","at":"add_remote_agent"|"transfer"|..}         the next such call on the connector's NIXL agent stops this process
                      (SIGSTOP) before it, or with "after":true behind it
  {"op":"spoil","key":K}                                      a published header or object is overwritten with what does not decode
  {"op":"stumble"}                                            the next decoding of what was got fails
  {"op":"done","key":K,"metadata":HEX,"claim":C,"generation":G}   tells the metadata's sender, whatever is true
  {"op":"stat"}  {"op":"cleanup","key":K}  {"op":"abandon","key":K}  {"op":"close"}

Values as JSON, exact: null, true, false, {"int":"-5"}, {"float":HEX of the little-endian double}, {"str":..}, {"bytes":HEX},
{"list":[..]}, {"tuple":[..]}, {"map":[[K,V]..]}, {"tensor":"torch.int8","shape":[..],"data":HEX},
{"ndarray":["<f4",[..],HEX]}. Of bytes and tensors above 4 KiB "bytes sha256", or "sha256" for "data".
"""
import faulthandler, hashlib, json, os, signal, socket, struct, sys, threading, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import omni_boot, payloads
import msgspec, numpy, torch

Nixl, _, _ = omni_boot.load()
import vllm.distributed.nixl_utils, vllm_omni.data_entry_keys  # noqa: E401, F401  what a connector imports when it is made

INLINE = 4096  # bytes that are shown as they are


def build(v):
    if v is None or isinstance(v, bool):
        return v
    if "tensor" in v:
        dtype = getattr(torch, v["tensor"].removeprefix("torch."))
        data = bytearray(bytes.fromhex(v["data"]))
        if not data:
            return torch.empty(v["shape"], dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(v["shape"])
    (kind, x), = v.items()
    return {
        "int": int, "str": str, "bytes": bytes.fromhex,
        "float": lambda s: struct.unpack("<d", bytes.fromhex(s))[0],
        "list": lambda a: [build(e) for e in a],
        "tuple": lambda a: tuple(build(e) for e in a),
        "map": lambda a: {build(k): build(e) for k, e in a},
        "ndarray": lambda a: numpy.frombuffer(bytes.fromhex(a[2]), dtype=a[0]).reshape(a[1]),
    }[kind](x)


def describe(v):
    if v is None or isinstance(v, bool):
        return v
    if isinstance(v, int):
        return {"int": str(v)}
    if isinstance(v, float):
        return {"float": struct.pack("<d", v).hex()}
    if isinstance(v, str):
        return {"str": v}
    if isinstance(v, (bytes, bytearray, memoryview)):
        return {"bytes": bytes(v).hex()} if len(v) <= INLINE else {"bytes sha256": hashlib.sha256(v).hexdigest()}
    if isinstance(v, list):
        return {"list": [describe(e) for e in v]}
    if isinstance(v, tuple):
        return {"tuple": [describe(e) for e in v]}
    if isinstance(v, dict):
        return {"map": [[describe(k), describe(e)] for k, e in v.items()]}
    if isinstance(v, numpy.ndarray):
        return {"ndarray": [v.dtype.str, list(v.shape), v.tobytes().hex()]}
    if isinstance(v, torch.Tensor):
        b = payloads.tensor_bytes(v)
        d = {"tensor": str(v.dtype), "shape": list(v.shape)}
        d |= {"data": b.hex()} if len(b) <= INLINE else {"sha256": hashlib.sha256(b).hexdigest()}
        return d
    return {"other": repr(v)}


class Stopping:
    """The connector's NIXL agent, which stops this process at a call."""

    def __init__(self, agent, at, after):
        self._agent, self._at, self._after = agent, at, after

    def __getattr__(self, name):
        f = getattr(self._agent, name)
        if name != self._at:
            return f

        def call(*args, **kw):
            self._at = None
            if not self._after:
                os.kill(os.getpid(), signal.SIGSTOP)
            r = f(*args, **kw)
            if self._after:
                os.kill(os.getpid(), signal.SIGSTOP)
            return r

        return call


class Peer:
    def __init__(self):
        self.c = None

    def open(self, config, env=None, host=0):
        os.environ.update(env or {})
        if host:
            namespaces = [open(f"/proc/{host}/ns/{n}") for n in ("net", "mnt")]
            for f in namespaces:
                setns(f.fileno())
        self.c = Nixl(config)
        return self.c.get_connection_info()

    def put(self, key, value=None, case=None):
        ok, size, m = self.c.put("0", "1", key, payloads.build(case) if case else build(value))
        return {"ok": ok, "size": size, "metadata": msgspec.msgpack.encode(m).hex() if ok else None}

    def puts(self, key, first, count, bytes):
        for i in range(first, first + count):
            if not self.c.put("0", "1", f"{key}{i}", torch.full((bytes,), i % 251, dtype=torch.uint8))[0]:
                return {"ok": False}
        return {"ok": True}

    def get(self, key, metadata=None, wait=0.0, deadline=None, brief=False):
        meta = msgspec.msgpack.decode(bytes.fromhex(metadata)) if metadata else None
        end, tries = time.monotonic() + wait, 0
        while True:
            tries += 1
            if deadline is None:
                r = self.c.get("0", "1", key, meta)
            else:
                r = self.c.get_with_deadline("0", "1", key, meta, deadline=time.monotonic() + deadline)
            if r is not None:
                return {"ok": True, "size": r[1], "value": None if brief else describe(r[0]), "tries": tries}
            if time.monotonic() >= end:
                return {"ok": False, "tries": tries}
            time.sleep(0.05)

    def gets(self, key, first, count, endpoint, wait=10.0):
        good, size = 0, 0
        for i in range(first, first + count):
            end, r = time.monotonic() + wait, None
            while r is None and time.monotonic() < end:
                r = self.c.get("0", "1", f"{key}{i}", {"source_host": endpoint[0], "source_port": endpoint[1]})
            if r is not None:
                good, size = good + bool((r[0] == i % 251).all()), size + r[1]
        return {"good": good, "size": size}

    def stop(self, at, after=False):
        self.c._agent = Stopping(self.c._agent, at, after)
        return {}

    def spoil(self, key):
        with self.c._state_lock:
            self.c._pending[key].tensors[0].fill_(0xC1)
        return {}

    def stumble(self):
        def fails(_):
            del self.c.deserialize_obj
            raise ValueError("no such value")

        self.c.deserialize_obj = fails
        return {}

    def done(self, key, metadata, claim, generation):
        m = msgspec.msgpack.decode(bytes.fromhex(metadata)) | {"claim_id": claim, "generation": generation}
        return {"ok": self.c._notify_transfer_done(key, m)}

    def stat(self):
        c = self.c
        with c._state_lock:
            pending = {k: sorted(p.claims) for k, p in c._pending.items()}
        return {"pending": pending, "registrations": len(c._registered_descs), "deferred": len(c._deferred_transfers),
                "agents": len(c._remote_agents), "status": c.health()["status"], "closed": c._closed,
                "fds": len(os.listdir("/proc/self/fd"))}

    def cleanup(self, key):
        self.c.cleanup(key)
        return {}

    def abandon(self, key):
        self.c.abandon_get(key)
        return {}

    def close(self):
        self.c.close()
        return {"closed": self.c._closed}


def setns(fd):
    import ctypes
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
        raise OSError(ctypes.get_errno(), "setns")


def die_with_parent():
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def serve(conn):
    peer, f = Peer(), conn.makefile("rw")

    def say(o):
        f.write(json.dumps(o) + "\n")
        f.flush()

    say({"pid": os.getpid()})
    for line in f:
        q = json.loads(line)
        try:
            r = getattr(peer, q.pop("op"))(**q)
        except Exception as e:
            r = {"error": repr(e)}
        say(r)


def main():
    die_with_parent()
    faulthandler.enable()
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    s = socket.socket(socket.AF_UNIX)
    s.bind(sys.argv[1])
    s.listen()
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print("ready", threading.active_count(), flush=True)
    while True:
        conn, _ = s.accept()
        if os.fork():
            conn.close()
            continue
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        s.close()
        try:
            serve(conn)
        except (BrokenPipeError, ConnectionError):
            pass
        finally:
            os._exit(0)


main()
