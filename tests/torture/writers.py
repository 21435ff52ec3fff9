"""Writer processes for the torture tests: ``python -m tests.torture.writers JSON``.

One process imports kvstore, forks the writers (so that each starts within milliseconds), executes the plan
on them, and prints the results as JSON. A writer stores and loads random blocks, verifies every byte it loaded,
and reports each round on its pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.torture.blocks import Client

BLOCKS_PER_JOB = 6

LIMIT_S = 780
"""Time limit of a plan, which then ends unfinished. The longest takes one minute on a machine with two cores."""

LONGER = 3
"""Factor by which a plan in seconds may take longer on a slow machine."""

PATIENCE_S = 20
"""Time limit for a victim's reports; afterwards it is killed without them."""


def write_for_ever(config: dict[str, Any], seed: int, universe: int, report: int, gate: int) -> None:
    """Store and load until killed; one byte on the pipe per round, ``W`` if a byte was wrong.

    Begins once the writing ends of ``gate`` are closed.
    """
    rng = random.Random(seed)
    client = Client(config)
    os.write(report, b"s")
    os.read(gate, 1)
    parent = os.getppid()
    while os.getppid() == parent:
        numbers = rng.sample(range(universe), BLOCKS_PER_JOB)
        stored = client.store(numbers)
        os.write(report, b"+" if stored.success else b"-")
        numbers = rng.sample(range(universe), BLOCKS_PER_JOB)
        loaded = client.load(numbers)
        wrong = client.wrong(numbers, loaded)
        os.write(report, b"W" if wrong else b"h" if loaded.successful_keys else b"m")


def fork_writer(config: dict[str, Any], seed: int, universe: int, gate: tuple[int, int]) -> tuple[int, int]:
    """Start a writer; return its pid and the reading end of its pipe. ``gate``: pipe, see :func:`write_for_ever`."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        os.set_blocking(reading, False)
        return pid, reading
    try:
        os.close(reading)
        if gate[1] >= 0:
            os.close(gate[1])
        write_for_ever(config, seed, universe, writing, gate[0])
    except BaseException as error:  # A dying child must not run the parent's code.
        os.write(writing, b"E")
        os.write(2, f"writer {seed}: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(0)


def drain_pipe(reading: int) -> bytes:
    """Read a writer's reports."""
    said = b""
    try:
        while chunk := os.read(reading, 65536):
            said += chunk
    except BlockingIOError:
        pass
    return said


def usage_at_once(root: Path) -> int:
    """Sum the lengths of segments that all existed at one moment, while others are created and removed."""
    before, after = (_sizes(root) for _ in range(2))
    return sum(size for found, size in before.items() if found in after and found[0].endswith(".seg"))


def _sizes(root: Path) -> dict[tuple[str, int, int], int]:
    sizes = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                # The inode number of a removed file is soon reused.
                sizes[path, status.st_ino, status.st_ctime_ns] = status.st_size
    return sizes


def main() -> None:
    """Run a plan: ``config``, ``writers``, ``universe``, ``seed``, and ``kills`` or ``seconds``.

    ``words`` is the maximum number of a victim's reports before its kill. ``at_least`` has minimum report counts;
    on a slow machine the plan takes more seconds until these are reached.
    """
    plan = json.loads(sys.argv[1])
    rng = random.Random(plan["seed"])
    root = Path(plan["config"]["path"])
    config, universe = plan["config"], plan["universe"]
    gate = os.pipe()
    writers = dict(fork_writer(config, rng.randrange(1 << 30), universe, gate) for _ in range(plan["writers"]))
    said = dict.fromkeys(writers, b"")
    kills, peak, samples = 0, 0, 0
    longest = plan.get("words", 30)
    started = time.monotonic()

    def listen() -> None:
        for pid, pipe in writers.items():
            said[pid] += drain_pipe(pipe)

    def report() -> dict[str, int]:
        heard = b"".join(said.values())
        counts = {name: heard.count(code) for name, code in _CODES.items()}
        return {"kills": kills, "peak_bytes": peak, "samples": samples, **counts}

    def goes_on() -> bool:
        passed_s = time.monotonic() - started
        if passed_s > (LIMIT_S if "kills" in plan else LONGER * plan["seconds"]):
            return False
        if "kills" in plan:
            return kills < int(plan["kills"])
        if passed_s < plan["seconds"]:
            return True
        found = report()
        return any(found[name] < count for name, count in plan.get("at_least", {}).items())

    # Engines that store take the space of directories that others may still be about to adopt.
    while "kills" not in plan and not all(said.values()) and goes_on():
        time.sleep(0.02)
        listen()
    os.close(gate[1])
    gate = gate[0], -1
    while goes_on():
        if "kills" not in plan:
            time.sleep(0.02)
            listen()
            peak, samples = max(peak, usage_at_once(root)), samples + 1
            continue
        # A victim is killed while it starts, at its first reports, or in the middle of its work.
        pid, words = rng.choice(list(writers)), rng.choice([0, 1, rng.randrange(2, longest), rng.randrange(2, longest)])
        patience = time.monotonic() + PATIENCE_S
        while len(said[pid]) < words and time.monotonic() < patience:
            time.sleep(0.002)
            listen()
        time.sleep(rng.uniform(0.0, 0.01))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        listen()
        os.close(writers.pop(pid))
        pid, pipe = fork_writer(config, rng.randrange(1 << 30), universe, gate)
        writers[pid], said[pid] = pipe, said.get(pid, b"")
        kills += 1
    # All before the first is waited for: those still running would remove the directories of those that ended.
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
    for pid, pipe in writers.items():
        os.waitpid(pid, 0)
        said[pid] += drain_pipe(pipe)
    sys.stdout.write(json.dumps(report()))


_CODES = {
    "started": b"s",
    "stored": b"+",
    "not_stored": b"-",
    "hits": b"h",
    "misses": b"m",
    "wrong": b"W",
    "errors": b"E",
}

if __name__ == "__main__":
    main()
