"""Loads from another process's memory over loopback: kvstore's peer tier, and plain sockets as the upper bound.

    python bench/peer.py [--quick] [--runs N] [--sizes KIB ...] [--mib N] [--json FILE]

A second process serves rows of shared memory. ``plain-tcp`` sends them with ``sendmsg`` and receives them with
``recv_into`` into rows of this process, with a blocking thread per job and no header or checksum: the upper bound.
``kvstore-peer`` is a whole tier. Lookups are answered before the clock starts; then kvstore-bench's driver submits jobs
and polls. The server hashes each row, and the client verifies each record in its slot. With ``spin`` a thread of each
process spins in Python meanwhile. ``mooncake`` is Mooncake's TransferEngine over TCP, if
mooncake-transfer-engine-non-cuda is installed; it makes one batched, unverified read per job, on a thread per job.
``kvstore-peer-secret`` is the tier with a ``secret``, so that every byte is authenticated.

``cpu_s_per_gb`` is the CPU time of this process, ``server_cpu_s_per_gb`` that of the server. Before each run all blocks
are loaded and compared. Systems take turns, run by run; a row is the median.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import (
    Row,
    arguments,
    bytes_of,
    driven_row,
    end_with_parent,
    in_turns,
    median_row,
    reporting,
    run_phase,
    runs_of,
    shared_memory,
)
from kvstore.cli.bench.driver import Driver, the_spinner
from kvstore.cli.bench.payload import Payload
from kvstore.cli.bench.systems import Op, PooledSystem, System, TierSystem
from kvstore.cli.bench.workload import Mix, Workload
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region
from kvstore.primary.lending import Lender
from kvstore.tiers import open_tier
from kvstore.types import LookupResult, Outcome

KIB, MIB = 1024, 1024**2
JOB_BYTES = 16 * MIB
HELD_BYTES_MAX = 256 * MIB
"""Bytes that the server holds, far more than a processor's cache; not more than a run loads."""
NAMESPACE = Namespace({"bench": "peer"})
QUESTION = struct.Struct("<II")
COLUMNS = [
    "system", "op", "block_bytes", "blocks_per_job", "jobs", "host", "spin", "gb_per_s", "cpu_s_per_gb",
    "server_cpu_s_per_gb", "latency_s_p50", "latency_s_p99", "of_plain", "verified", "runs",
]  # fmt: skip


class Holder:
    """The serving process; it is controlled on its standard input."""

    def __init__(self, system: str, size: int, spin: bool, held: int) -> None:
        self.blocks = held // size
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        arguments = [sys.executable, __file__, "--serve", json.dumps([system, self.port, size, spin, held])]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            process_group=0,  # Ctrl-C ends the program, which then ends this process.
        )  # fmt: skip
        assert self._process.stdout is not None
        hello = json.loads(self._process.stdout.readline())
        self.port, self.address = hello.get("port", self.port), hello.get("address", 0)

    def cpu_s(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def serve(system: str, port: int, size: int, spin: bool, held: int) -> None:
    """Serve until the standard input ends: the main program of the serving process."""
    end_with_parent()
    memory = shared_memory(held)
    view, count = memoryview(memory), held // size
    payload = Payload("random", size, 1)
    payload.prepare(Region.wrap(memory, size)).write(range(count), range(count))
    hello: dict[str, Any] = {}
    tier = None
    if system == "mooncake":
        engine = mooncake_over(memory)
        hello = {"port": engine.get_rpc_port(), "address": address_of(memory)}
    elif system == "plain-tcp":
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=serve_plain, args=(listener, view, size), daemon=True).start()
    else:
        primary = PrimaryTier(view, size)
        keys = [payload.key(number) for number in range(count)]
        assert primary.allocate(keys) == list(range(count))
        primary.commit(keys)
        options = {"backend": "peer", "listen": f"127.0.0.1:{port}", "timeout": 60, **secret_of(system)}
        tier = open_tier(options, primary=view, slot_bytes=size, namespace=NAMESPACE, lender=Lender(primary))
    with the_spinner() if spin else contextlib.nullcontext():
        print(json.dumps(hello), flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)
    if tier is not None:
        tier.close()
    os._exit(0)  # Threads that serve plain sockets hold the memory.


def secret_of(system: str) -> dict[str, str]:
    """Return the option ``secret`` of a peer tier, if it has one."""
    return {"secret": "a secret of sixteen"} if system.endswith("secret") else {}


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Return the address of memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def mooncake_over(memory: mmap.mmap | memoryview) -> Any:
    """Return a TransferEngine over TCP with registered memory; it is released only when the process ends."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    for status in (
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
        engine.register_memory(address_of(memory), len(memory)),
    ):
        if status:
            raise RuntimeError(f"mooncake: status {status}")
    return engine


def serve_plain(listener: socket.socket, view: memoryview, size: int) -> None:
    """Send the requested rows, on a thread per connection."""

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


class PlainSockets(PooledSystem):
    """Plain sockets: a blocking thread and a connection per concurrent job."""

    name = "plain-tcp"

    def __init__(self, holder: Holder, region: Region, jobs: int) -> None:
        super().__init__(jobs)
        self.holder, self.region, self.size = holder, region, region.slot_bytes
        self.number_of = {Payload("random", self.size, 1).key(number): number for number in range(holder.blocks)}
        self._local = threading.local()

    def move(self, op: Op, keys: Sequence[bytes], slots: Sequence[int]) -> Sequence[Outcome]:
        self.load(self.number_of[keys[0]], slots)
        return [Outcome.OK] * len(keys)

    def load(self, first: int, slots: Sequence[int]) -> None:
        if not hasattr(self._local, "socket"):
            self._local.socket = socket.create_connection(("127.0.0.1", self.holder.port))
        self._local.socket.sendall(QUESTION.pack(first, len(slots)))
        for slot in slots:
            row, at = self.region.view()[slot * self.size :][: self.size], 0
            while at < self.size:
                at += self._local.socket.recv_into(row[at:])


class Addressed(PlainSockets):
    """An engine that reads by addresses, with one batched read per job on a thread."""

    def load(self, first: int, slots: Sequence[int]) -> None:
        theirs = [self.holder.address + (first + i) * self.size for i in range(len(slots))]
        self.read([self.region.address + slot * self.size for slot in slots], theirs)

    @abstractmethod
    def read(self, ours: list[int], theirs: list[int]) -> None:
        """Read blocks from the server's addresses into this process's."""


class Mooncake(Addressed):
    """Mooncake's TransferEngine."""

    name = "mooncake"

    def __init__(self, holder: Holder, region: Region, jobs: int) -> None:
        super().__init__(holder, region, jobs)
        self.engine = mooncake_over(region.view())

    def read(self, ours: list[int], theirs: list[int]) -> None:
        peer = f"127.0.0.1:{self.holder.port}"
        if self.engine.batch_transfer_sync_read(peer, ours, theirs, [self.size] * len(ours)):
            raise RuntimeError("mooncake: a read failed")


OTHERS: dict[str, type[Any]] = {"plain-tcp": PlainSockets, "mooncake": Mooncake}


def opened_tier(system: str, holder: Holder, region: Region, host: str) -> System:
    """Open a tier and wait until lookups of all blocks of the serving process are hits."""
    options = {"backend": "peer", "peers": [f"127.0.0.1:{holder.port}"], "io": host, "positive_ttl": 3600}
    patient = {"load_timeout": 60, "lookup_timeout": 10, "timeout": 60, **secret_of(system)}
    size = region.slot_bytes
    tier = TierSystem({**options, **patient}, region.view(), size, NAMESPACE, name=system)
    keys = [Payload("random", size, 1).key(number) for number in range(holder.blocks)]
    while {tier.lookup(key, 0) for key in keys} != {LookupResult.HIT}:
        tier.finished()
        time.sleep(1e-3)
    tier.looks_up = False
    return tier


def measure(system: str, size: int, jobs: int, total: int, host: str, spin: bool) -> Row:
    """Make one run, in a process of its own if necessary; return its row."""
    if system != "mooncake":
        return measure_here(system, size, jobs, total, host, spin)
    # Its engine is released only when its process ends.
    order = [sys.executable, __file__, "--measure", json.dumps([system, size, jobs, total, host, spin])]
    done = subprocess.run(order, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    row: Row = json.loads(done.stdout)
    return row


def measure_here(system: str, size: int, jobs: int, total: int, host: str, spin: bool) -> Row:
    """Make one run; return its row."""
    per_job = max(1, JOB_BYTES // size)
    workload = Workload(
        size, per_job, jobs, Mix(0.0), duration_s=600.0, ops_max=max(4, total // (per_job * size)), warmup_s=0.0,
        verify="none", spin=spin,
    )  # fmt: skip
    holder = Holder(system, size, spin, min(HELD_BYTES_MAX, total))
    region = Region.wrap(shared_memory(workload.slots * size), size)
    opened = opened_tier(system, holder, region, host) if system not in OTHERS else OTHERS[system](holder, region, jobs)
    try:
        driver = Driver(opened, Payload("random", size, 1).prepare(region))
        driver.adopt(holder.blocks // per_job, per_job)
        if driver.verify(workload).wrong:  # Also makes connections.
            raise RuntimeError(f"{system}: wrong bytes")
        server_s = holder.cpu_s()
        result = run_phase(driver, workload)
        server_s = holder.cpu_s() - server_s
    finally:
        opened.close()
        holder.close()
    row = driven_row("peer", driver, workload, result) | {"host": host, "verified": system not in OTHERS}
    if not spin and host == "thread":
        row["server_cpu_s_per_gb"] = server_s / (result.load.blocks * size / 1e9)
        row["cpu_s_per_gb"] -= row["server_cpu_s_per_gb"]  # It includes that of children.
    return row


def cases(sizes: Sequence[int]) -> Iterator[tuple[str, int, int, str, bool]]:
    """Yield system, block size, jobs, host and spin of each row."""
    systems = [
        "plain-tcp",
        "kvstore-peer",
        "kvstore-peer-secret",
        *(["mooncake"] if importlib.util.find_spec("mooncake") else []),
    ]
    for size in sizes:
        for jobs in (1, 8):
            for system in systems:
                yield system, size, jobs, "thread", False
    for host in ("thread", "process") if 2 * MIB in sizes else ():
        yield "kvstore-peer", 2 * MIB, 8, host, True


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*json.loads(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure_here(*json.loads(sys.argv[2]))), flush=True)
        os._exit(0)
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", help="KiB per block")
    parser.add_argument("--mib", type=int, help="MiB per run, at least 16 (default: 2048, with --quick 512)")
    options = parser.parse_args()
    sizes = [kib * KIB for kib in options.sizes or ((512, 2048) if options.quick else (128, 512, 2048, 8192))]
    total = bytes_of(options, 2048, 512)
    with reporting(options, COLUMNS) as rows:
        # Systems take turns within a block size and number of jobs, so that an interrupted run reports complete groups.
        for _, group in itertools.groupby(cases(sizes), key=lambda case: (case[1], case[2], case[4])):
            turns: dict[str, Callable[[], Row]] = {
                json.dumps(case): partial(measure, *case[:3], total, *case[3:]) for case in group
            }
            found = [median_row(runs) for runs in in_turns(runs_of(options, 5), turns).values()]
            plain = {row["system"]: row["gb_per_s"] for row in found}.get("plain-tcp")
            for row in found:
                if plain is not None and row["system"] != "plain-tcp":
                    row["of_plain"] = row["gb_per_s"] / plain
            rows += found


if __name__ == "__main__":
    main()
