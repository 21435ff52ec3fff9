"""Other caches measured by their own tools, each beside kvstore under the same tool, or as its own engine uses it.

- lmcache: `lmcache bench l2` over LMCache's adapters for files, raw devices (io_uring), Redis and S3, and over
  `kvstore.lmcache` with a disk, Redis and S3 tier. It compares every byte of its last round.
- sglang: SGLang's controller and host pool over its file backend and over `kvstore.sglang` (bench/hicache.py).
- mooncake: Mooncake Store's client over its SSD offload (bench/mooncake_ssd.py), beside a disk tier as an engine has it
  (bench/disk.py, one job of 64 blocks at a time). Its client writes once a second, in which its stores end.

Loads bypass the page cache, or the files have left it, except in rows marked "buffered". Systems of a group take turns,
each with an empty directory and a server of its own in every run. ``kvstore_over`` is kvstore's rate over that of the
row; all commands follow the table. A row that can't run says why.

    python bench/peers.py [--quick] [--runs N] [--sizes 128 2048] [--only lmcache-files sglang] [--json FILE]

The first run downloads LMCache, SGLang and what they need, without their dependencies, into the virtual environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, needs, reporting, runs_of, scratch

needs("torch", "boto3", "mooncake.store", programs=["redis-server", "fio"])

from tests.outside.sources import LMCACHE, LMCACHE_MORE, ROOT, SGLANG, packages
from tests.redis import servers as redis
from tests.s3 import servers as s3
from tests.s3.clients import options_for

COLUMNS = ("group", "op", "block_bytes", "system", "gb_per_s", "kvstore_over", "runs", "failure")
KVSTORE = "kvstore"
CAPACITY = 8 << 30
_TIMEOUT_S = 900.0


class Size(NamedTuple):
    """How much each tool moves."""

    kib: int  # Of a block.
    blocks: int  # Of a request; two requests at a time, where the tool has any.
    rounds: int


class Result(NamedTuple):
    """Of one run."""

    gb_per_s: Mapping[str, float]  # By operation.
    block_bytes: int
    command: str


Measure = Callable[[Path, Size], Result]


def run(command: list[str], *paths: Path, **environment: str) -> str:
    """Run a tool; return its output.

    Raises:
        RuntimeError: It failed; the message has the end of its output.
    """
    path = os.pathsep.join(map(str, [*paths, ROOT]))
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **environment}, cwd=ROOT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[1:5])}… failed: {(ended.stderr or ended.stdout).strip()[-300:]}")
    return ended.stdout


def adapter_config(tier: Any) -> dict[str, Any]:
    """Return the argument of LMCache's ``--l2-adapter`` with a tier of kvstore."""
    return {
        "type": "plugin",
        "module_path": "kvstore.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {"tier": tier},
    }


Spec = Callable[[Path, Size], contextlib.AbstractContextManager[Mapping[str, Any]]]


def lmcache(spec_of: Spec) -> Measure:
    """Return a measurement of one of LMCache's adapters."""

    def measure(work: Path, size: Size) -> Result:
        with spec_of(work, size) as spec:
            command = [
                *(sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(spec)),
                *("--no-skip-verify", "--num-keys", str(size.blocks), "--in-flight", "2", "--rounds", str(size.rounds)),
                *("--data-size-kb", str(size.kib), "--l1-align-bytes", "4096", "--format", "json", "--quiet"),
            ]
            paths = (packages(LMCACHE), packages(LMCACHE_MORE))
            output = run([*command, "--output", str(work / "result.json")], *paths, LMCACHE_DISABLE_BANNER="1")
        found = json.loads((work / "result.json").read_text())["metrics"]
        rates = {}
        for each in (found["op_0"], found["op_2"]):
            if each["total_success"] != each["total_keys"]:
                failed = each["total_keys"] - each["total_success"]
                raise RuntimeError(f"{each['operation']}: {failed} of {each['total_keys']} objects failed: {output}")
            moved = each["keys_per_round"] * size.kib * 1024
            rates[each["operation"].lower()] = moved / 1e9 / (each["duration_avg_ms"] / 1e3)
        return Result(rates, size.kib << 10, shlex.join(["python", *command[1:]]))

    return measure


def of_directory(**spec: Any) -> Spec:
    """Return an adapter over files."""

    @contextlib.contextmanager
    def made(work: Path, size: Size) -> Iterator[Mapping[str, Any]]:
        yield {**spec, "base_path": str(work / "files")}

    return made


@contextlib.contextmanager
def raw_block(work: Path, size: Size) -> Iterator[Mapping[str, Any]]:
    """LMCache's raw device, here a file, with io_uring."""
    device = work / "device"
    device.touch()
    os.truncate(device, CAPACITY)
    yield {
        "type": "raw_block", "device_path": str(device), "slot_bytes": (size.kib << 10) + 4096,
        "capacity_bytes": CAPACITY, "io_engine": "io_uring",
    }  # fmt: skip


@contextlib.contextmanager
def kvstore_file(work: Path, size: Size) -> Iterator[Mapping[str, Any]]:
    """The disk tier."""
    yield adapter_config({"type": "file", "path": str(work / "kv"), "capacity": CAPACITY, "namespace": "bench"})


@contextlib.contextmanager
def resp(work: Path, size: Size) -> Iterator[Mapping[str, Any]]:
    """LMCache's Redis client in C++."""
    with redis.running(redis.plain("redis", work, memory="4gb")) as (server,):
        yield {"type": "resp", "host": "127.0.0.1", "port": server.port}


@contextlib.contextmanager
def kvstore_redis(work: Path, size: Size) -> Iterator[Mapping[str, Any]]:
    """The Redis tier."""
    with redis.running(redis.plain("redis", work, memory="4gb")) as (server,):
        yield adapter_config({"type": "redis", "url": server.url, "namespace": "bench"})


@contextlib.contextmanager
def seaweed(work: Path) -> Iterator[s3.S3Server]:
    """Run SeaweedFS with a bucket that has an address of its own, as LMCache requires it.

    The host of http://127.0.0.1 is the bucket "127" of the domain "0.0.1", which no name server has to know.
    """
    server = s3.weed(work)
    server.arguments.append("-s3.domainName=0.0.1")
    server.bucket, server.url = "127", server.url.replace("127.0.0.1", "localhost")
    with s3.running(server):
        yield server


@contextlib.contextmanager
def lmcache_s3(work: Path, size: Size) -> Iterator[Mapping[str, Any]]:
    """LMCache's S3 client, the common runtime of AWS in C."""
    with seaweed(work) as server:
        yield {
            "type": "s3", "s3_endpoint": server.url.removeprefix("http://").replace("localhost", "127.0.0.1"),
            "s3_region": server.region, "s3_prefer_http2": False, "disable_tls": True,
            "aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key,
        }  # fmt: skip


@contextlib.contextmanager
def kvstore_s3(work: Path, size: Size) -> Iterator[Mapping[str, Any]]:
    """The S3 tier."""
    with seaweed(work) as server:
        yield adapter_config({"type": "s3", "namespace": "bench", **options_for(server)})


def program(module: str, *words: str, paths: tuple[str, ...] = ()) -> Measure:
    """Return a measurement by a program here, which prints bytes and seconds; "{…}" in its arguments is filled in."""

    def measure(work: Path, size: Size) -> Result:
        given = [word.format(work=work, kib=size.kib, rounds=size.rounds) for word in words]
        output = run([sys.executable, "-m", module, *given], *([packages(paths)] if paths else []))
        found = json.loads(output.splitlines()[-1])
        rates = {op: found["bytes"] / 1e9 / found[op] for op in ("store", "load")}
        return Result(rates, found["block_bytes"], f"python -m {module} {shlex.join(given)}")

    return measure


def disk_tier(work: Path, size: Size) -> Result:
    """Measure kvstore's disk tier as an engine has it, by bench/disk.py."""
    options = f"--systems kvstore-file-empty --engines 1 --no-spin --runs 1 --sizes {size.kib}".split()
    report = work / "disk.json"
    command = ["bench/disk.py", *options, "--directory", str(work), *(["--quick"] if size.rounds < 4 else [])]
    run([sys.executable, *command, "--json", str(report)])
    rows = [row for row in json.loads(report.read_text())["rows"] if row["system"] != "fio" and row["jobs"] == 1]
    return Result({row["op"]: row["gb_per_s"] for row in rows}, size.kib << 10, shlex.join(["python", *command]))


GROUPS: Mapping[str, Mapping[str, Measure]] = {
    "lmcache-files": {
        KVSTORE: lmcache(kvstore_file),
        "fs": lmcache(of_directory(type="fs", use_odirect=True)),
        "fs, buffered": lmcache(of_directory(type="fs")),
        "fs_native": lmcache(of_directory(type="fs_native", use_odirect=True)),
        "fs_native, buffered": lmcache(of_directory(type="fs_native")),
        "raw_block": lmcache(raw_block),
    },
    "lmcache-redis": {KVSTORE: lmcache(kvstore_redis), "resp": lmcache(resp)},
    "lmcache-s3": {KVSTORE: lmcache(kvstore_s3), "s3": lmcache(lmcache_s3)},
    "sglang": {
        KVSTORE: program("bench.hicache", "dynamic", "{work}/kv", "{rounds}", paths=SGLANG),
        "file": program("bench.hicache", "file", "{work}/kv", "{rounds}", paths=SGLANG),
    },
    "mooncake": {
        KVSTORE: disk_tier,
        "SSD offload": program("bench.mooncake_ssd", "{work}/ssd", "{kib}", "{rounds}"),
    },
}


def measure_group(group: str, size: Size, runs: int, root: Path) -> Iterator[Row]:
    """Measure the systems of a group in turns; yield a row for each operation and system."""
    found: dict[str, list[Result]] = {}
    failures: dict[str, str] = {}
    names = list(GROUPS[group])
    for number in range(runs):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in failures:
                continue
            with tempfile.TemporaryDirectory(dir=root) as work:
                try:
                    found.setdefault(name, []).append(GROUPS[group][name](Path(work), size))
                except (RuntimeError, subprocess.SubprocessError, OSError, redis.CannotStartError) as error:
                    failures[name] = " ".join(str(error).split())
            print(f"  {group} {size.kib} KiB, {name}: {failures.get(name, 'done')}", file=sys.stderr, flush=True)
    for op in ("store", "load"):
        rates = {
            name: statistics.median(each.gb_per_s[op] for each in results)
            for name, results in found.items()
            if name not in failures
        }
        for name in names:
            row: Row = {"bench": "peers", "group": group, "op": op, "system": name, "runs": runs}
            if name in failures:
                yield {**row, "block_bytes": size.kib << 10, "failure": failures[name][-160:]}
                continue
            result = found[name][0]
            row |= {"block_bytes": result.block_bytes, "gb_per_s": rates[name], "command": result.command}
            if KVSTORE in rates:
                row["kvstore_over"] = rates[KVSTORE] / rates[name]
            yield row


def main() -> int:
    """Measure and print; returns 0 if all systems ran."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the drive to measure (default: here)")
    parser.add_argument("--sizes", type=int, nargs="+", help="KiB of a block (default: 128 2048)")
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=GROUPS, help="groups to measure")
    options = parser.parse_args()
    sizes = [
        Size(kib, 4, 2) if options.quick else Size(kib, 32, 4)
        for kib in options.sizes or ([128] if options.quick else [128, 2048])
    ]
    with reporting(options, COLUMNS) as rows, scratch(options.directory.resolve()) as root:
        for group in options.only:
            # Pages of SGLang have one size.
            for size in sizes[:1] if group == "sglang" else sizes:
                rows += measure_group(group, size, runs_of(options, 3), root)
    for command in dict.fromkeys(
        f"{row['group']}, {row['system']}: {row['command']}" for row in rows if "command" in row
    ):
        print(command)
    return 1 if any("failure" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
