"""S3 clients side by side: aioboto3 as people call it, plain aiohttp, and kvstore's two clients.

    python bench/s3.py [--quick] [--runs N] [--sizes KIB ...] [--json FILE]

Two servers: one of our own that answers at once from memory, in a process of its own, and throws away what is put
("null"); and SeaweedFS. Every system moves the same objects, so many at once, in one process on one event loop
(uvloop). The plain clients return bytes, which are thrown away. kvstore's clients read from slots and into slots;
"kvstore-s3" is the whole backend under a tier's I/O side, with headers, checksums and verification, one block or eight
a job. ``of_direct``: of the rate of kvstore's default client alone, which does what a plain client does. Systems take
turns, run by run; a row is the median. CPU time is this process's, all threads. ``spin``: the same with a thread
spinning in Python beside it, as a busy scheduler does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In place of this directory, whose modules would hide packages of the same name: this one.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import aioboto3
import aiohttp
import boto3
import httptools
import uvloop
from botocore.config import Config

from bench.common import Row, arguments, at_once, beside_spinner, median_row, percentile, print_table, write_json
from bench.slots import MovedSlots
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
"""Objects that are read again and again; as many as are in flight at most."""

WEED_VOLUMES = 64
"""GiB at most that SeaweedFS takes; with the largest blocks, 64 at once, all systems together put 20 GiB."""

PATIENCE_S = 60
"""A loaded machine is no reason to fail here."""


@dataclass(frozen=True)
class Place:
    """A server, and the objects of one size on it."""

    name: str
    server: FaultServer | S3Server
    size: int
    inflight: int

    def read_key(self, number: int) -> str:
        """Return the name of an object that is there."""
        return f"bench/{self.size}/{number % OBJECTS:04}"


class Client(ABC):
    """One system under test."""

    name: str
    plain = True
    verified = False
    blocks_per_job = 1
    _rounds = itertools.count()

    def __init__(self, place: Place) -> None:
        self.place = place
        self.round = f"{os.getpid()}-{next(self._rounds)}"

    @functools.cached_property
    def values(self) -> list[bytes]:
        """What the plain clients put: as many as are in flight, which is the memory that our slots take, too.

        A few values again and again would be read from the processor's cache, and blocks are not.
        """
        value = os.urandom(self.place.size)
        return [number.to_bytes(8, "big") + value[8:] for number in range(self.place.inflight)]

    def value(self, number: int) -> bytes:
        """Return what a plain client puts under a number."""
        return self.values[number % len(self.values)]

    def write_key(self, number: int) -> str:
        """Return a name that no other run has."""
        return f"put/{self.round}/{number:08}"

    async def prepare(self, op: str, count: int) -> None:  # noqa: B027 - most have nothing to prepare.
        """Do what is not to be measured."""

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def put(self, number: int) -> None: ...

    @abstractmethod
    async def get(self, number: int) -> None: ...


class Aioboto3(Client):
    """One client of aioboto3 with its defaults, put_object and get_object: what most programs do."""

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
        check(await answer["Body"].read(), self.place.size)


class PlainAiohttp(Client):
    """aiohttp with URLs that were signed before: no work but HTTP."""

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
            check(await answer.read(), self.place.size)


class OurClient(Client):
    """A client of kvstore, with its retries and limits, from slots and into slots."""

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
        """Lend a slot."""
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
    """kvstore's client by aioboto3's calls."""

    name = "kvstore-aioboto3"
    client_name = "aioboto3"


class OurBackend(Client):
    """kvstore as a tier does it: slots, headers, checksums, verification on worker threads; its default client."""

    name = "kvstore-s3"
    plain = False
    verified = True

    async def prepare(self, op: str, count: int) -> None:
        if op == "get":
            # Records that it can verify; the same in all runs, so that they are put once. Nobody measures this.
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
        first = number * self.blocks_per_job
        await self.slots.move(JobKind.STORE, [self.new_key(first + i) for i in range(self.blocks_per_job)])

    async def get(self, number: int) -> None:
        first = number * self.blocks_per_job
        await self.slots.move(JobKind.LOAD, [self.block_key(first + i) for i in range(self.blocks_per_job)])


class OurBackendJobs(OurBackend):
    """The same with eight blocks a job, as engines ask for them; as many blocks in flight as the others have."""

    name = "kvstore-s3 x8"
    blocks_per_job = 8


SYSTEMS: list[type[Client]] = [Aioboto3, PlainAiohttp, OurDirect, OurAioboto3, OurBackend, OurBackendJobs]


def config_of(place: Place, client: str) -> S3Config:
    """Return kvstore's configuration for a server."""
    server = place.server
    options: dict[str, Any] = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
    return S3Config(
        bucket=server.bucket, endpoint=server.url, region=server.region, client=client,
        timeout=PATIENCE_S, connect_timeout=PATIENCE_S, concurrency=max(64, place.inflight), **options,
    )  # fmt: skip


def check(body: Any, size: int) -> None:
    """Raise unless a body has its length."""
    if len(body) != size:
        raise RuntimeError(f"{len(body)} bytes came, not {size}")


def fill(place: Place) -> None:
    """Put the objects that are read."""
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


def measure(system: type[Client], place: Place, op: str, total: int, spin: bool) -> Row:
    """Make one run in a loop of its own; return its row."""
    return uvloop.run(_measure(system, place, op, total, spin))


async def _measure(system: type[Client], place: Place, op: str, total: int, spin: bool) -> Row:
    per_job = system.blocks_per_job
    inflight = max(1, place.inflight // per_job)
    count = max(place.inflight * 2, total // place.size) // per_job
    row: Row = {"bench": "s3", "server": place.name, "system": system.name, "op": op, "block_bytes": place.size}
    row |= {
        "jobs": place.inflight,
        "blocks_per_job": per_job,
        "spin": spin,
        "verified": system.verified and op == "get",
    }
    client = system(place)
    await client.open()
    try:
        work = client.get if op == "get" else client.put
        # The first requests open connections; their numbers come before those that are measured.
        warm = min(inflight, count)
        await client.prepare(op, count + warm)
        await at_once(inflight, range(warm), work)
        with beside_spinner(spin) as spun:
            seconds, cpu_s, latencies = await at_once(inflight, range(warm, warm + count), work)
    finally:
        await client.close()
    count *= per_job
    gigabytes = count * place.size / 1e9
    row |= {"gb_per_s": gigabytes / seconds, "ops_per_s": count / seconds}
    if not spin:
        # The spinning thread's CPU time can't be told from the client's.
        row |= {"cpu_ms_per_op": cpu_s / count * 1e3, "cpu_s_per_gb": cpu_s / gigabytes}
    row |= {"latency_s_p50": percentile(latencies, 0.5), "latency_s_p99": percentile(latencies, 0.99)}
    return row | spun


def compare(place: Place, op: str, total: int, runs: int, *, spin: bool = False) -> list[Row]:
    """Return one row per system, its runs taken in turns with the others'."""
    found: dict[str, list[Row]] = {system.name: [] for system in SYSTEMS}
    for number in range(runs):
        turn = number % len(SYSTEMS)
        for system in SYSTEMS[turn:] + SYSTEMS[:turn]:
            found[system.name].append(measure(system, place, op, total, spin))
    rows = [median_row(found[system.name]) | _extra(found[system.name]) for system in SYSTEMS]
    usual = rows[0]["ops_per_s"]
    direct = next(row["ops_per_s"] for row in rows if row["system"] == OurDirect.name)
    fastest = max(row["ops_per_s"] for row, system in zip(rows, SYSTEMS, strict=True) if system.plain)
    for row in rows:
        row |= {"of_aioboto3": row["ops_per_s"] / usual, "of_fastest_plain": row["ops_per_s"] / fastest}
        row["of_direct"] = row["ops_per_s"] / direct
        name = f"{row['server']:5} {row['system']:16} {op} {place.size:>8} x{place.inflight:<3}"
        print(f"  {name} {row['gb_per_s']:.2f} GB/s {row['ops_per_s']:.0f}/s", file=sys.stderr)
    return rows


def _extra(rows: Sequence[Row]) -> Row:
    values = sorted(row["cpu_ms_per_op"] for row in rows if "cpu_ms_per_op" in row)
    return {"cpu_ms_per_op": values[len(values) // 2]} if values else {}


def main() -> None:
    """Start the servers, measure, print what there is (also when it is interrupted)."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, help="runs of each system, of which a row is the median")
    parser.add_argument("--only", choices=["null", "weed"], help="only one of the servers")
    parser.add_argument("--sizes", type=int, nargs="*", help="KiB per block")
    options = parser.parse_args()
    # No client is to look for credentials on the network.
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    runs = options.runs or (1 if options.quick else 3)
    sizes = [kib * KIB for kib in options.sizes or ((128, 2048) if options.quick else (128, 512, 2048, 8192))]
    rows: list[Row] = []
    load_before = os.getloadavg()[0]
    try:
        with fault_server() as null:
            if options.only != "weed":
                measure_all("null", null, rows, sizes, runs, quick=options.quick)
        for size in sizes if options.only != "null" else ():
            # One for each size: what is put stays there, and a server has to be thrown away to be rid of it.
            with (
                tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory,
                running(weed(Path(directory), volumes=WEED_VOLUMES)) as s3,
            ):
                measure_all("weed", s3, rows, [size], runs, quick=options.quick)
    except KeyboardInterrupt:
        print("interrupted: what follows is not all", file=sys.stderr)
    finally:
        print_table(rows, COLUMNS)
        load = {"before": load_before, "after": os.getloadavg()[0]}
        print(f"\nload average of the machine, ours included: {load}")
        libraries = {
            "aioboto3": aioboto3.__version__,
            "aiohttp": aiohttp.__version__,
            "httptools": httptools.__version__,
        }
        write_json(options.json, rows, libraries=libraries | {"uvloop": uvloop.__version__}, load_average=load)


def measure_all(
    name: str, server: FaultServer | S3Server, rows: list[Row], sizes: Sequence[int], runs: int, *, quick: bool
) -> None:
    """Measure everything on one server, adding to the rows."""
    total = (32 if quick else 256) * MIB
    if name == "weed":
        # A few tens of MB/s is what it writes here.
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
                    # Beside a spinning thread most of them take ten times as long.
                    rows += compare(place, op, max(64 * size, total // 8) if spin else total, runs, spin=spin)


if __name__ == "__main__":
    main()
