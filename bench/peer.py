"""Loads from another process's memory over loopback: kvstore's peer tier, and plain sockets as the ceiling.

    python bench/peer.py [--quick] [--runs N] [--json FILE]

A second process serves rows of shared memory. ``plain-tcp`` sends them by ``sendmsg`` from there, and receives by
``recv_into`` into rows here, with a blocking thread for each job and no header or checksum: the ceiling.
``kvstore-peer`` is a whole tier: lookups are answered before the clock starts, then jobs are submitted and polled as a
scheduler does; the server hashes each row, the client verifies each record in its slot. With ``spin`` both owners spin
in Python meanwhile. ``mooncake`` is Mooncake's TransferEngine over TCP, where mooncake-transfer-engine-non-cuda is
installed, and ``nixl`` is NIXL with UCX over TCP, where nixl, nixl-cu12 or nixl-cu13 is (``pip install --no-deps
nixl-cu12``; it needs no GPU): one batched read for each job, unverified, on a thread for each.
``kvstore-peer-nixl`` is the tier with ``"transport": "nixl"``.

``cpu_s_per_gb`` is this process's, ``server_cpu_s_per_gb`` the other's. After each run all bytes that were loaded last
are compared. Systems take turns, run by run; a row is the median.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import mmap
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, median_row, percentile, print_table, shared_memory, write_json
from bench.tiers import JobTimes, run_jobs
from kvstore.cli.measuring.systems import TierSystem
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier
from kvstore.primary.lending import Lender
from kvstore.tiers import open_tier
from kvstore.types import LookupResult

KIB, MIB = 1024, 1024**2
JOB_BYTES = 16 * MIB
HELD_BYTES = 256 * MIB
"""What the server holds: far more than a processor caches."""
NAMESPACE = Namespace({"bench": "peer"})
QUESTION = struct.Struct("<II")
NIXL = next((name for name in ("nixl", "nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name)), "")
"""Its package, if it is installed."""
COLUMNS = [
    "system", "op", "block_bytes", "blocks_per_job", "jobs", "host", "spin", "gb_per_s", "cpu_s_per_gb",
    "server_cpu_s_per_gb", "latency_s_p50", "latency_s_p99", "of_plain", "verified", "runs",
]  # fmt: skip


def key_of(number: int) -> bytes:
    """Return the key of a row."""
    return number.to_bytes(32, "big")


def content(number: int, size: int) -> bytes:
    """Return the bytes of a row."""
    return random.Random(number).randbytes(4 * KIB) * (size // (4 * KIB))


class Holder:
    """The other process; ``ask`` gives it orders on its standard input."""

    def __init__(self, system: str, size: int, spin: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        arguments = [sys.executable, __file__, "--serve", json.dumps([system, self.port, size, spin])]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        hello = json.loads(self._process.stdout.readline())
        self.port, self.address = hello.get("port", self.port), hello.get("address", 0)
        self.metadata = bytes.fromhex(hello.get("metadata", ""))

    def cpu_s(self) -> float:
        """Return the CPU seconds that it has used."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def serve(system: str, port: int, size: int, spin: bool) -> None:
    """Serve until the standard input ends; the other process's side of this program."""
    rows = HELD_BYTES // size
    with contextlib.closing(shared_memory(HELD_BYTES)) as memory:
        for number in range(rows):
            memory[number * size : (number + 1) * size] = content(number, size)
        view = memoryview(memory)
        ended, hello, tier = threading.Event(), {}, None
        if system == "mooncake":
            engine = mooncake_over(memory)
            hello = {"port": engine.get_rpc_port(), "address": address_of(memory)}
        elif system == "nixl":
            agent = nixl_over(memory)
            hello = {"address": address_of(memory), "metadata": agent.get_agent_metadata().hex()}
        elif system == "plain-tcp":
            listener = socket.create_server(("127.0.0.1", port))
            threading.Thread(target=serve_plain, args=(listener, view, size), daemon=True).start()
        else:
            primary = PrimaryTier(view, size)
            keys = [key_of(number) for number in range(rows)]
            assert primary.allocate(keys) == list(range(rows))
            primary.commit(keys)
            options = {
                "backend": "peer",
                "listen": f"127.0.0.1:{port}",
                "timeout": 60,
                "transport": transport_of(system),
            }
            tier = open_tier(options, primary=view, slot_bytes=size, namespace=NAMESPACE, lender=Lender(primary))
        if spin:
            threading.Thread(target=lambda: spin_until(ended.is_set), daemon=True).start()
        print(json.dumps(hello), flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)
        ended.set()
        if tier is not None:
            tier.close()
        os._exit(0)  # Threads that serve plain sockets hold the memory.


def transport_of(system: str) -> str:
    """Return the peer tier's ``transport``."""
    return "nixl" if system.endswith("nixl") else "tcp"


def address_of(memory: mmap.mmap) -> int:
    """Return where memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def mooncake_over(memory: mmap.mmap) -> Any:
    """Return a TransferEngine over TCP with memory registered; it is never let go of, and ends with the process."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    for status in (
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
        engine.register_memory(address_of(memory), len(memory)),
    ):
        if status:
            raise RuntimeError(f"mooncake: status {status}")
    return engine


def nixl_over(memory: mmap.mmap) -> Any:
    """Return an agent of NIXL over TCP with memory registered; it is never let go of, and ends with the process."""
    api = importlib.import_module(f"{NIXL}._api")
    config = api.nixl_agent_config(sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    agent = api.nixl_agent(f"kvstore-{os.getpid()}", config)
    agent.register_memory([(address_of(memory), len(memory), 0, "")], "DRAM")
    return agent


def serve_plain(listener: socket.socket, view: memoryview, size: int) -> None:
    """Send rows to whoever asks for them, on a thread for each connection."""

    def answer(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := sock.recv(QUESTION.size, socket.MSG_WAITALL):
            first, count = QUESTION.unpack(data)
            left = [view[number * size : (number + 1) * size] for number in range(first, first + count)]
            while left:
                sent = sock.sendmsg(left[:64])
                while left and sent >= left[0].nbytes:
                    sent -= left.pop(0).nbytes
                if sent:
                    left[0] = left[0][sent:]

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=answer, args=(sock,), daemon=True).start()


def spin_until(is_over: Callable[[], object]) -> None:
    """Compute in Python, as a scheduler does."""
    while not is_over():
        sum(range(2000))


def jobs_of(size: int, total: int) -> tuple[int, list[int]]:
    """Return the blocks of a job, and the first row of each job, in random order."""
    per_job = max(1, JOB_BYTES // size)
    firsts = list(range(0, HELD_BYTES // size, per_job))
    rng = random.Random(size)
    return per_job, [rng.choice(firsts) for _ in range(max(4, total // (per_job * size)))]


def load_in_threads(size: int, jobs: int, total: int, move: Callable[[int, int], object]) -> JobTimes:
    """Load on a thread for each lane; ``move`` gets the lane and the first row of a job."""
    _, firsts = jobs_of(size, total)
    waiting, lock, latencies, last = iter(range(len(firsts))), threading.Lock(), [], [0] * jobs

    def work(lane: int) -> None:
        while True:
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            begun = time.perf_counter()
            move(lane, firsts[job])
            last[lane] = job
            latencies.append(time.perf_counter() - begun)

    started = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(jobs)))
    return JobTimes(latencies, time.perf_counter() - started, last)


def load_plain(port: int, size: int, jobs: int, total: int, view: memoryview) -> JobTimes:
    """Load by plain sockets."""
    per_job, _ = jobs_of(size, total)

    def move(lane: int, first: int) -> None:
        sockets[lane].sendall(QUESTION.pack(first, per_job))
        for i in range(per_job):
            row, at = view[(lane * per_job + i) * size :][:size], 0
            while at < size:
                at += sockets[lane].recv_into(row[at:])

    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(jobs)]
        return load_in_threads(size, jobs, total, move)


def load_mooncake(engine: Any, holder: Holder, size: int, jobs: int, total: int, address: int) -> JobTimes:
    """Load by Mooncake."""
    per_job, _ = jobs_of(size, total)

    def move(lane: int, first: int) -> None:
        ours = [address + (lane * per_job + i) * size for i in range(per_job)]
        theirs = [holder.address + (first + i) * size for i in range(per_job)]
        if engine.batch_transfer_sync_read(f"127.0.0.1:{holder.port}", ours, theirs, [size] * per_job):
            raise RuntimeError("mooncake: a read failed")

    return load_in_threads(size, jobs, total, move)


def load_nixl(agent: Any, holder: Holder, size: int, jobs: int, total: int, address: int) -> JobTimes:
    """Load by NIXL."""
    per_job, _ = jobs_of(size, total)
    remote = agent.add_remote_agent(holder.metadata)

    def move(lane: int, first: int) -> None:
        ours = [(address + (lane * per_job + i) * size, size, 0) for i in range(per_job)]
        theirs = [(holder.address + (first + i) * size, size, 0) for i in range(per_job)]
        local, distant = agent.get_xfer_descs(ours, "DRAM"), agent.get_xfer_descs(theirs, "DRAM")
        transfer = agent.initialize_xfer("READ", local, distant, remote)
        state = agent.transfer(transfer)
        while state == "PROC":
            time.sleep(5e-4)
            state = agent.check_xfer_state(transfer)
        transfer.release()
        if state != "DONE":
            raise RuntimeError(f"nixl: {state}")

    return load_in_threads(size, jobs, total, move)


def load_tier(system: TierSystem, size: int, jobs: int, total: int, spin: bool) -> JobTimes:
    """Load through a tier."""
    per_job, firsts = jobs_of(size, total)
    everything = [key_of(number) for number in range(HELD_BYTES // size)]
    while {system.lookup(key, 0) for key in everything} != {LookupResult.HIT}:
        system.finished()
        time.sleep(1e-3)
    pause = (lambda: sum(range(2000))) if spin else (lambda: time.sleep(5e-4))
    return run_jobs(system, "load", [everything[first : first + per_job] for first in firsts], jobs, pause)


def measure(system: str, size: int, jobs: int, total: int, host: str, spin: bool) -> Row:
    """Make one run, in a process of its own where it needs one; return its row."""
    if system not in ("mooncake", "nixl"):
        return measure_here(system, size, jobs, total, host, spin)
    # Their engines can't be let go of.
    arguments = [sys.executable, __file__, "--measure", json.dumps([system, size, jobs, total, host, spin])]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    row: Row = json.loads(done.stdout)
    return row


def measure_here(system: str, size: int, jobs: int, total: int, host: str, spin: bool) -> Row:
    """Make one run; return its row."""
    per_job, _ = jobs_of(size, total)
    memory = shared_memory(jobs * per_job * size)
    view = memoryview(memory)
    holder = Holder(system, size, spin)
    tier: TierSystem | None = None
    try:
        if system.startswith("kvstore-peer"):
            options = {"backend": "peer", "peers": [f"127.0.0.1:{holder.port}"], "io": host, "positive_ttl": 3600}
            patient = {"load_timeout": 60, "lookup_timeout": 10, "timeout": 60, "transport": transport_of(system)}
            tier = TierSystem({**options, **patient}, view, size, NAMESPACE, name=system)
        engine = mooncake_over(memory) if system == "mooncake" else nixl_over(memory) if system == "nixl" else None

        def load(total: int) -> JobTimes:
            if tier is not None:
                return load_tier(tier, size, jobs, total, spin)
            if engine is not None:
                load_by = load_mooncake if system == "mooncake" else load_nixl
                return load_by(engine, holder, size, jobs, total, address_of(memory))
            return load_plain(holder.port, size, jobs, total, view)

        load(jobs * JOB_BYTES)  # Connections are made, and memory is there.
        server_s, client_s = holder.cpu_s(), time.process_time()
        latencies, seconds, last = load(total)
        client_s, server_s = time.process_time() - client_s, holder.cpu_s() - server_s
        _, firsts = jobs_of(size, total)
        for lane, first in enumerate(firsts[job] for job in last):
            for i in range(per_job):
                start = (lane * per_job + i) * size
                assert memory[start : start + size] == content(first + i, size), "wrong bytes"
    finally:
        if tier is not None:
            tier.close()
        holder.close()
        view.release()
        with contextlib.suppress(BufferError):  # The address that an engine has of it is one.
            memory.close()
    gigabytes = len(latencies) * per_job * size / 1e9
    row: Row = {"bench": "peer", "system": system, "op": "load", "block_bytes": size, "blocks_per_job": per_job}
    row |= {"jobs": jobs, "host": host, "spin": spin, "verified": tier is not None}
    row |= {"gb_per_s": gigabytes / seconds, "ops_per_s": len(latencies) * per_job / seconds}
    if not spin and host == "thread":
        row |= {"cpu_s_per_gb": client_s / gigabytes, "server_cpu_s_per_gb": server_s / gigabytes}
    return row | {"latency_s_p50": percentile(latencies, 0.5), "latency_s_p99": percentile(latencies, 0.99)}


def cases(quick: bool) -> Iterator[tuple[str, int, int, str, bool]]:
    """Yield system, block size, jobs, host and spin of each row."""
    for size in (512 * KIB, 2 * MIB) if quick else (128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB):
        for jobs in (1, 8):
            yield "plain-tcp", size, jobs, "thread", False
            yield "kvstore-peer", size, jobs, "thread", False
            if importlib.util.find_spec("mooncake") is not None:
                yield "mooncake", size, jobs, "thread", False
            if NIXL:
                yield "nixl", size, jobs, "thread", False
                yield "kvstore-peer-nixl", size, jobs, "thread", False
    for host in ("thread", "process"):
        yield "kvstore-peer", 2 * MIB, 8, host, True


def main() -> None:
    """Command line."""
    os.environ |= {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "FATAL"}  # NIXL logs to the standard output.
    if sys.argv[1:2] == ["--serve"]:
        serve(*json.loads(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure_here(*json.loads(sys.argv[2]))), flush=True)
        os._exit(0)
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=0, help="runs of each row; default 5, with --quick 1")
    args = parser.parse_args()
    runs, total = args.runs or (1 if args.quick else 5), (512 if args.quick else 2048) * MIB
    found: dict[tuple[str, int, int, str, bool], list[Row]] = {}
    for _ in range(runs):
        for case in cases(args.quick):
            system, size, jobs, host, spin = case
            found.setdefault(case, []).append(measure(system, size, jobs, total, host, spin))
    rows = []
    for (system, size, jobs, _host, spin), measured in found.items():
        row = median_row(measured)
        if "server_cpu_s_per_gb" in row:
            row["server_cpu_s_per_gb"] = statistics.median(one["server_cpu_s_per_gb"] for one in measured)
        plain = found.get(("plain-tcp", size, jobs, "thread", False))
        if system != "plain-tcp" and plain and not spin:
            row["of_plain"] = row["gb_per_s"] / median_row(plain)["gb_per_s"]
        rows.append(row)
    print_table(rows, COLUMNS)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
