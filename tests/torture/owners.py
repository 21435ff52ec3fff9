"""Engines that are killed while others use the same root: ``python -m tests.torture.owners JSON``.

The process imports kvstore once and forks the engines, so that each starts within milliseconds, and prints the
results as JSON. Plans are ``kills``: a writer that evicts is killed repeatedly while another engine reads its slots;
and ``races``: four engines start at once over the segments of the last four.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.config import Capacity
from kvstore.errors import RecordError
from kvstore.namespace import Namespace
from kvstore.testing.records import RecordMaker
from kvstore.types import Outcome
from tests.torture.blocks import key_of, payload_of
from tests.torture.writers import drain_pipe

PAYLOAD = 16384
SLOT = 4096 + PAYLOAD
NAMESPACE = Namespace({"test": "owners"})
GEOMETRY = RecordGeometry(HEADER_BYTES, PAYLOAD)
UNIVERSE = 96
BATCH = 4
ENGINES = 4

_maker = RecordMaker(NAMESPACE, GEOMETRY, random.Random(0))
_codec = RecordCodec(NAMESPACE, header_bytes=HEADER_BYTES)
_payloads = [payload_of(number, PAYLOAD) for number in range(UNIVERSE)]
_writes = [_maker.write(key_of(number), payload) for number, payload in enumerate(_payloads)]


def backend(plan: dict[str, Any], rng: random.Random) -> DiskBackend:
    """Return a backend over the plan's root, on a ring or on threads."""
    return DiskBackend(
        DiskConfig(
            path=plan["path"],
            capacity=Capacity(plan["blocks"] * SLOT),
            reserve=Capacity(0),
            engine=rng.choice(["io_uring", "threads"]),
        )
    )


def fork(work: Coroutine[Any, Any, None]) -> int:
    """Run a coroutine in a child process; return its pid."""
    pid = os.fork()
    if pid:
        work.close()
        return pid
    try:
        asyncio.run(work)
    except BaseException as error:  # A dying child must not run the parent's code.
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


async def write_for_ever(plan: dict[str, Any], seed: int, report: int) -> None:
    """Store until killed, writing one byte per batch to the pipe."""
    rng = random.Random(seed)
    disk = backend(plan, rng)
    await disk.open(NAMESPACE, GEOMETRY)
    os.write(report, b"s")
    while True:
        await disk.put([_writes[number] for number in rng.sample(range(UNIVERSE), BATCH)])
        os.write(report, b"+")


async def read(disk: DiskBackend, numbers: list[int], found: Counter[str]) -> None:
    """Read blocks and verify every byte."""
    targets = [_maker.target(key_of(number)) for number in numbers]
    outcomes = await disk.get_into([target.read for target in targets])
    for number, target, outcome in zip(numbers, targets, outcomes, strict=True):
        found[outcome.name] += 1
        if outcome is not Outcome.OK:
            continue
        content, read = target.payload.view, target.read
        try:
            size = _codec.verify(key_of(number), target.header.view, content, read.filled_bytes)
        except RecordError:
            found["torn"] += 1
            continue
        found["wrong" if bytes(content[:size]) != _payloads[number] else "right"] += 1


async def read_until_stopped(plan: dict[str, Any], seed: int, stop_read: int, report: int) -> None:
    """Read other engines' blocks until the pipe ends; then report the results."""
    rng = random.Random(seed)
    disk = backend(plan, rng)
    await disk.open(NAMESPACE, GEOMETRY)
    os.write(report, b"r")
    os.set_blocking(stop_read, False)
    found: Counter[str] = Counter()
    while True:
        known = [n for n, there in enumerate(await disk.exists([key_of(n) for n in range(UNIVERSE)])) if there]
        if known:
            await read(disk, rng.sample(known, min(len(known), 8)), found)
        await asyncio.sleep(0)
        try:
            if not os.read(stop_read, 1):
                break
        except BlockingIOError:
            continue
    await disk.close()
    os.write(report, json.dumps(found).encode())


def kills(plan: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Kill a writer again and again while another engine reads."""
    stop_read, stop_write = os.pipe()
    report_read, report_write = os.pipe()
    reader = os.fork()
    if not reader:
        os.close(stop_write)
        os.close(report_read)
        os._exit(_exit_status(read_until_stopped(plan, rng.randrange(1 << 30), stop_read, report_write)))
    os.close(stop_read)
    os.close(report_write)
    assert os.read(report_read, 1) == b"r"
    words = 0
    for _ in range(plan["kills"]):
        words_read, words_write = os.pipe()
        victim = fork(write_for_ever(plan, rng.randrange(1 << 30), words_write))
        os.close(words_write)
        # The writer is killed while it starts, or in the middle of its work.
        wanted = rng.randrange(-2, 12)
        while wanted > 0 and (said := len(os.read(words_read, wanted))):
            words, wanted = words + said, wanted - said
        time.sleep(rng.uniform(0.0, 0.003 if wanted == 0 else 0.03))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        os.set_blocking(words_read, False)
        words += len(drain_pipe(words_read))
        os.close(words_read)
    os.close(stop_write)
    found = b""
    while chunk := os.read(report_read, 65536):
        found += chunk
    _, status = os.waitpid(reader, 0)
    return {**json.loads(found or b"{}"), "words": words, "status": status}


def _exit_status(work: Coroutine[Any, Any, None]) -> int:
    try:
        asyncio.run(work)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        return 1
    return 0


async def take_part(plan: dict[str, Any], seed: int, numbers: list[int], go: int, report: int, end: int) -> None:
    """Start on a byte from ``go``, store blocks, report the outcome, and close on a byte from ``end``."""
    disk = backend(plan, random.Random(seed))
    os.read(go, 1)
    await disk.open(NAMESPACE, GEOMETRY)
    outcomes = await disk.put([_writes[number] for number in numbers])
    good = all(outcome in (Outcome.OK, Outcome.EXISTS) for outcome in outcomes)
    os.write(report, b"good\n" if good else b"bad\n")
    os.read(end, 1)
    await disk.close()


async def look(plan: dict[str, Any], numbers: list[int], report: int) -> None:
    """Read blocks stored by others, and report the results."""
    disk = backend(plan, random.Random(0))
    await disk.open(NAMESPACE, GEOMETRY)
    found: Counter[str] = Counter()
    await read(disk, numbers, found)
    await disk.close()
    os.write(report, json.dumps(found).encode())


def races(plan: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Start four engines at once, let one read all blocks stored by them and by earlier ones, and end them."""
    report: Counter[str] = Counter()
    stored: set[int] = set()
    for _ in range(plan["races"]):
        (go, start), (report_read, report_write), (end, finish) = os.pipe(), os.pipe(), os.pipe()
        pids = []
        for _ in range(ENGINES):
            numbers = rng.sample(range(UNIVERSE), BATCH)
            stored |= set(numbers)
            pid = os.fork()
            if not pid:
                os.close(start)
                os.close(finish)
                os._exit(_exit_status(take_part(plan, rng.randrange(1 << 30), numbers, go, report_write, end)))
            pids.append(pid)
        os.close(start)
        os.close(report_write)
        lines = []
        with os.fdopen(report_read) as words:
            for _ in range(ENGINES):
                lines.append(words.readline())
        report["engines"] += len(lines)
        report["not_stored"] += sum(line != "good\n" for line in lines)
        seen, tells = os.pipe()
        pid = fork(look(plan, sorted(stored), tells))
        os.close(tells)
        with os.fdopen(seen) as words:
            report.update(json.loads(words.read() or '{"silent": 1}'))
        os.waitpid(pid, 0)
        # Some end by themselves, the others are killed.
        for pid in rng.sample(pids, rng.randrange(ENGINES + 1)):
            os.kill(pid, signal.SIGKILL)
        os.close(finish)
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            report["failed"] += os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
        os.close(go)
        os.close(end)
    return dict(report)


def main() -> None:
    """Run a plan: ``path``, ``blocks`` of capacity, ``seed``, and ``kills`` or ``races``."""
    plan = json.loads(sys.argv[1])
    rng = random.Random(plan["seed"])
    found = kills(plan, rng) if "kills" in plan else races(plan, rng)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
