"""S3 clients side by side: aioboto3 in its usual way, plain aiohttp, and kvstore's two clients.

    python bench/s3.py [--quick] [--runs N] [--sizes KIB ...] [--mib N] [--only SERVER] [--json FILE]

There are two servers: "null", a server of this repository that answers immediately from memory, in a process of its
own, and discards stored objects; and SeaweedFS. Every system moves the same objects, with the same number in flight, in
one process on one event loop (uvloop). The plain clients return bytes, which are discarded. kvstore's clients transfer
from and into slots; "kvstore-s3" is the whole backend with a tier's I/O side: headers, checksums and verification, with
one or eight blocks per job. ``of_direct`` is the rate divided by that of kvstore's default client alone, which does the
work of a plain client. Systems take turns, run by run; a row is the median. CPU time is that of all threads of this
process. With ``spin`` a thread spins in Python beside the clients, like a busy scheduler.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# The repository replaces this directory, whose modules would hide packages of the same name.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, bytes_of, in_turns, median_row, needs, reporting, runs_of

needs("aioboto3", "aiohttp", "boto3", "cryptography", "httptools", "uvloop")

import aioboto3
import aiohttp
import boto3
import httptools
import uvloop
from botocore.config import Config

from bench.clients import Client, MovedSlots, at_once, measured
from kvstore.backends.s3 import S3Backend, S3Config
from kvstore.backends.s3.client import make_client
from kvstore.namespace import Namespace
from kvstore.runtime.messages import JobKind
from tests.s3.fault_server import FaultServer, fault_server
from tests.s3.servers import S3Server, running, weed

KIB, MIB = 1024, 1024**2
COLUMNS = [
    "server", "system", "op", "block_bytes", "jobs", "spin", "gb_per_s", "ops_per_s", "cpu_ms_per_op",
    "latency_s_p50", "latency_s_p99", "spin_rate", "of_fastest_plain", "of_aioboto3", "of_direct", "verified", "runs",
]  # fmt: skip
OBJECTS = 64
"""Objects that are read repeatedly; the largest number in flight."""

WEED_VOLUMES = 64
"""Capacity of SeaweedFS in GiB; with the largest blocks, 64 in flight, all systems together store 20 GiB."""

PATIENCE_S = 60
"""Timeouts, long enough for a loaded machine."""


@dataclass(frozen=True)
class Place:
    """A server, and the objects of one size on it."""

    name: str
    server: FaultServer | S3Server
    size: int
    inflight: int

    def read_key(self, number: int) -> str:
        return f"bench/{self.size}/{number % OBJECTS:04}"


class S3Client(Client):
    """One system under test."""

    plain = True
    _rounds = itertools.count()

    def __init__(self, place: Place) -> None:
        super().__init__(place.size, place.inflight)
        self.place = place
        self.round = f"{os.getpid()}-{next(self._rounds)}"

    def write_key(self, number: int) -> str:
        """Return a name that is unique to this run."""
        return f"put/{self.round}/{number:08}"

    async def prepare(self, op: str, count: int) -> None:
        """Do preparations that are not measured."""


class Aioboto3(S3Client):
    """One client of aioboto3 with its defaults, put_object and get_object, as in most programs."""

    name = "aioboto3"

    async def open(self) -> None:
        server = self.place.server
        self.stack = contextlib.AsyncExitStack()
        session = aioboto3.Session(server.access_key, server.secret_key, region_name=server.region)
        self.client = await self.stack.enter_async_context(session.client("s3", endpoint_url=server.url))

    async def close(self) -> None:
        await self.stack.aclose()

    async def put(self, number: int) -> None:
        bucket = self.place.server.bucket
        await self.client.put_object(Bucket=bucket, Key=self.write_key(number), Body=self.value(number))

    async def get(self, number: int) -> None:
        answer = await self.client.get_object(Bucket=self.place.server.bucket, Key=self.place.read_key(number))
        self.check(await answer["Body"].read())


class PlainAiohttp(S3Client):
    """aiohttp with presigned URLs: no work but HTTP."""

    name = "aiohttp"

    async def prepare(self, op: str, count: int) -> None:
        server = self.place.server
        signer = boto3.client(
            "s3", endpoint_url=server.url, region_name=server.region, aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key, config=Config(signature_version="s3v4"),
        )  # fmt: skip
        name = "put_object" if op == "put" else "get_object"
        keys = [self.write_key(i) if op == "put" else self.place.read_key(i) for i in range(count)]
        known = {
            key: signer.generate_presigned_url(name, Params={"Bucket": server.bucket, "Key": key}) for key in set(keys)
        }
        self.urls = [known[key] for key in keys]
        signer.close()

    async def open(self) -> None:
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self.place.inflight))

    async def close(self) -> None:
        await self.session.close()

    async def put(self, number: int) -> None:
        async with self.session.put(self.urls[number], data=self.value(number)) as answer:
            answer.raise_for_status()
            await answer.read()

    async def get(self, number: int) -> None:
        async with self.session.get(self.urls[number]) as answer:
            answer.raise_for_status()
            self.check(await answer.read())


class OurClient(S3Client):
    """A client of kvstore, with its retries and limits, which transfers from and into slots."""

    plain = False
    client_name: str

    async def open(self) -> None:
        self.client = make_client(config_of(self.place, self.client_name))
        await self.client.open()
        size = self.place.size
        self.memory = memoryview(bytearray(random.Random(1).randbytes(size)) * self.place.inflight)
        self.free = list(range(self.place.inflight))

    async def close(self) -> None:
        await self.client.close()

    async def put(self, number: int) -> None:
        with self.slot() as slot:
            if await self.client.put(self.write_key(number), [slot], timeout_s=PATIENCE_S, if_absent=True) is None:
                raise RuntimeError("an object was there")

    async def get(self, number: int) -> None:
        with self.slot() as slot:
            found = await self.client.get_into(self.place.read_key(number), [slot], timeout_s=PATIENCE_S)
            if found is None or found.size_bytes != self.place.size:
                raise RuntimeError("an object is missing")

    @contextlib.contextmanager
    def slot(self) -> Iterator[memoryview]:
        index = self.free.pop()
        try:
            yield self.memory[index * self.place.size : (index + 1) * self.place.size]
        finally:
            self.free.append(index)


class OurDirect(OurClient):
    """kvstore's default client."""

    name = "kvstore-direct"
    client_name = "direct"


class OurAioboto3(OurClient):
    """kvstore's client that uses aioboto3."""

    name = "kvstore-aioboto3"
    client_name = "aioboto3"


class OurBackend(S3Client):
    """kvstore with a tier's work: slots, headers, checksums, verification on worker threads; its default client."""

    name = "kvstore-s3"
    plain = False
    verified = True

    async def prepare(self, op: str, count: int) -> None:
        if op == "get":
            # Store verifiable records; they are the same in all runs, so they are stored once. Not measured.
            server = self.place.server
            if isinstance(server, FaultServer):
                server.keep_puts(True)
            for number in range(OBJECTS):
                await self.slots.move(JobKind.STORE, [self.block_key(number)])
            if isinstance(server, FaultServer):
                server.keep_puts(False)

    async def open(self) -> None:
        namespace = Namespace({"bench": "s3", "size": self.place.size})
        backend = S3Backend(config_of(self.place, "auto"))
        self.slots = MovedSlots(backend, namespace, self.place.size, self.place.inflight)
        await self.slots.open()

    async def close(self) -> None:
        await self.slots.close()

    def block_key(self, number: int) -> bytes:
        return b"%032d" % (number % OBJECTS)

    def new_key(self, number: int) -> bytes:
        return self.round.encode().rjust(16, b"-")[:16] + b"%016d" % number

    async def put(self, number: int) -> None:
        await self.slots.move(JobKind.STORE, [self.new_key(each) for each in self.numbers_of(number)])

    async def get(self, number: int) -> None:
        await self.slots.move(JobKind.LOAD, [self.block_key(each) for each in self.numbers_of(number)])


class OurBackendJobs(OurBackend):
    """The same with eight blocks per job, as in engines, and as many blocks in flight as the others."""

    name = "kvstore-s3 x8"
    blocks_per_job = 8


SYSTEMS: list[type[Any]] = [Aioboto3, PlainAiohttp, OurDirect, OurAioboto3, OurBackend, OurBackendJobs]


def config_of(place: Place, client: str) -> S3Config:
    """Return kvstore's configuration for a server."""
    server = place.server
    options: dict[str, Any] = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
    return S3Config(
        bucket=server.bucket, endpoint=server.url, region=server.region, client=client,
        timeout=PATIENCE_S, connect_timeout=PATIENCE_S, concurrency=max(64, place.inflight), **options,
    )  # fmt: skip


def fill(place: Place) -> None:
    """Store the objects to read."""
    server = place.server
    if isinstance(server, FaultServer):
        server.clear()
        server.keep_puts(True)
    store = boto3.client(
        "s3", endpoint_url=server.url, region_name=server.region, aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )  # fmt: skip
    for number in range(OBJECTS):
        store.put_object(Bucket=server.bucket, Key=place.read_key(number), Body=os.urandom(place.size))
    store.close()
    if isinstance(server, FaultServer):
        server.keep_puts(False)


def measure(kind: type[Any], place: Place, op: str, total: int, spin: bool) -> Row:
    """Make one run in a loop of its own; return its row."""

    async def run() -> Row:
        client = kind(place)
        count = max(place.inflight * 2, total // place.size) // client.per_job
        await client.open()
        try:
            work = client.get if op == "get" else client.put
            # The first requests open connections and are not measured.
            warm = min(client.workers, count)
            await client.prepare(op, count + warm)
            await at_once(client.workers, range(warm), work)
            return await measured(client, op, range(warm, warm + count), work, spin=spin)
        finally:
            await client.close()

    # ``jobs`` is the number of blocks in flight, for any length of a job.
    return {"bench": "s3", "server": place.name, **uvloop.run(run()), "jobs": place.inflight}


def compare(place: Place, op: str, total: int, runs: int, *, spin: bool = False) -> list[Row]:
    """Return one row per system, its runs taken in turns with the others'."""
    turns: dict[str, Callable[[], Row]] = {
        kind.name: partial(measure, kind, place, op, total, spin) for kind in SYSTEMS
    }
    rows = [median_row(of_one) for of_one in in_turns(runs, turns).values()]
    rates = {row["system"]: row["ops_per_s"] for row in rows}
    fastest = max(rates[kind.name] for kind in SYSTEMS if kind.plain)
    for row in rows:
        rate = row["ops_per_s"]
        row |= {"of_aioboto3": rate / rates[Aioboto3.name], "of_fastest_plain": rate / fastest}
        row["of_direct"] = rate / rates[OurDirect.name]
        name = f"{row['server']:5} {row['system']:16} {op} {place.size:>8} x{place.inflight:<3}"
        print(f"  {name} {row['gb_per_s']:.2f} GB/s {rate:.0f}/s", file=sys.stderr)
    return rows


def measure_all(
    name: str, server: FaultServer | S3Server, rows: list[Row], sizes: Sequence[int], options: argparse.Namespace
) -> None:
    """Measure everything on one server, adding to the rows."""
    total, runs, quick = bytes_of(options, 256, 32), runs_of(options, 3), options.quick
    if name == "weed":
        # It writes only a few tens of MB/s.
        total //= 8
    for size in sizes:
        place = Place(name, server, size, 8)
        fill(place)
        for spin in (False, True):
            for inflight in (8, 64):
                if (spin or quick) and inflight == 64 and size != 128 * KIB:
                    continue
                place = Place(name, server, size, inflight)
                for op in ("get", "put"):
                    # Beside a spinning thread most clients take ten times as long.
                    rows += compare(place, op, max(64 * size, total // 8) if spin else total, runs, spin=spin)


def main() -> None:
    """Start the servers, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=["null", "weed"], help="only one of the servers")
    parser.add_argument("--sizes", type=int, nargs="*", help="KiB per block")
    parser.add_argument(
        "--mib", type=int, help="MiB per run (default: 256, with --quick 32; an eighth of it in SeaweedFS)"
    )
    options = parser.parse_args()
    # Keeps clients from searching credentials on the network.
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    sizes = [kib * KIB for kib in options.sizes or ((128, 2048) if options.quick else (128, 512, 2048, 8192))]
    libraries = {module.__name__: module.__version__ for module in (aioboto3, aiohttp, httptools, uvloop)}
    with reporting(options, COLUMNS, libraries=libraries) as rows:
        if options.only != "weed":
            with fault_server() as null:
                measure_all("null", null, rows, sizes, options)
        for size in sizes if options.only != "null" else ():
            # One server per size, because stored objects are removed only with their server.
            with (
                tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory,
                running(weed(Path(directory), volumes=WEED_VOLUMES)) as s3,
            ):
                measure_all("weed", s3, rows, [size], options)


if __name__ == "__main__":
    main()
