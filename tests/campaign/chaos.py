"""Chaos: a real engine answers random requests while its disk, its server and its processes fail.

    python -m tests.campaign.chaos [--minutes N] [--seed S]

A vLLM engine on the CPU with kvstore's manager, a disk tier on a small ext4 and a Redis tier. At random the disk fills,
freezes, loses its directory or returns errors and damaged records; Redis stops or dies; the I/O process and the whole
engine are killed. Every answer must equal that of an engine without offloading, and no batch of requests may take
longer than a bound. After the last fault the tiers must be in use again, memory must not have grown, and nothing may be
left: no job, pinned slot, descriptor, thread, process, or file in /dev/shm or the temporary directory.

Needs root (mounts), redis-server and vLLM. One seed draws the same faults and requests; their coincidence is not part
of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from examples.tiny_llama import make_tiny_llama
from kvstore.testing.seeds import fresh_seed
from tests.campaign.erring_file import SWITCH
from tests.campaign.program import failed, not_run, passed
from tests.disk.mounts import ext4
from tests.redis.servers import CannotStartError, Server, binary, plain, running
from tests.vllm.engines import Engine, EngineError
from tests.vllm.walk.plan import plan_prompts

ANSWER_TOKENS: Final = 8
BATCH_MAX: Final = 4
BATCH_LIMIT_S: Final = 90.0
"""A batch that takes longer hangs: the longest deadline of a tier is 5 s, and computing one takes a few seconds even on
a busy machine."""

CALM_BATCHES: Final = 10
"""Batches without faults at the beginning of each life and at the end: enough to open all files and connections."""

GROWTH_MAX: Final = 0.05
WARM_S: Final = 300.0
"""A life's first minutes say nothing about growth: an engine without offloading takes 150 MiB more in its first 120
batches."""

FAULT_S: Final = (0.5, 8.0)
"""A fault lasts between these, so that breakers open during some and not during others."""

KILL_ENGINE_S: Final = 240.0
"""Mean life of an engine."""


@dataclass(frozen=True)
class Fault:
    """A fault that begins and ends; of one group only one is active."""

    name: str
    group: str
    begin: Callable[[], None]
    end: Callable[[], None] = lambda: None


class Weather(threading.Thread):
    """Begins and ends faults at random until it is stopped, and ends them all then."""

    def __init__(self, faults: list[Fault], rng: random.Random) -> None:
        super().__init__(name="weather", daemon=True)
        self.counts: Counter[str] = Counter()
        self.error: Exception | None = None
        self._faults, self._rng = faults, rng
        self._stop_it = threading.Event()

    def run(self) -> None:
        active: dict[str, tuple[Fault, float]] = {}
        try:
            while not self._stop_it.wait(self._rng.uniform(0.1, 2.0)):
                for group, (fault, until) in list(active.items()):
                    if time.monotonic() >= until:
                        fault.end()
                        del active[group]
                fault = self._rng.choice(self._faults)
                if fault.group not in active and self._rng.random() < 0.6:
                    fault.begin()
                    self.counts[fault.name] += 1
                    active[fault.group] = fault, time.monotonic() + self._rng.uniform(*FAULT_S)
        except Exception as error:  # Reported by stop().
            self.error = error
        finally:
            for fault, _ in active.values():
                fault.end()

    def stop(self) -> None:
        """End all faults.

        Raises:
            Exception: A fault could not begin or end.
        """
        self._stop_it.set()
        self.join()
        if self.error is not None:
            raise self.error


class Rig:
    """The engine, its media, and the faults that they can have."""

    def __init__(self, work: Path, disk: Path, server: Server, rng: random.Random) -> None:
        self.disk, self.server, self.rng = disk, server, rng
        self.engine: Engine | None = None
        self.killed = threading.Event()
        self.scratch = work / "scratch"
        self.scratch.mkdir()
        self.switch = work / "errors"
        os.environ[SWITCH] = str(self.switch)
        self._model = make_tiny_llama(work / "model")
        (disk / "tiers").mkdir()

    def right_answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the answers of an engine without offloading, each up to its first near tie."""
        engine = Engine(self._model, self.scratch / "reference.log", llm={"enable_prefix_caching": False})
        try:
            answers: list[list[int]] = engine.call("certain", prompts, ANSWER_TOKENS)
        finally:
            engine.close()
        return answers

    def start(self) -> Engine:
        """Start an engine with tiers of random options."""
        rng = self.rng
        disk = {
            "type": "tests.campaign.erring_file:ErringFile",
            "path": str(self.disk / "tiers" / "kv"),
            "capacity": "6MiB",
            "reserve": "4MiB",
            "io": rng.choice(("thread", "process")),
            "engine": rng.choice(("auto", "threads")),
        }
        redis = {"type": "redis", "url": self.server.url, "io": rng.choice(("thread", "process"))}
        offloading = {
            "spec_name": "KVStoreOffloadingSpec",
            "spec_module_path": "kvstore.vllm",
            "manager": "kvstore",
            "cpu_bytes_to_use": 40 * 32768,
            # The engine must also start while a medium is down.
            "secondary_tiers": [{**tier, "required": False, "reset": "keep"} for tier in (disk, redis)],
        }
        self.killed.clear()
        llm = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 256, "max_model_len": 1024}
        self.engine = Engine(self._model, self.scratch / "engine.log", offloading=offloading, llm=llm)
        return self.engine

    def process(self) -> psutil.Process:
        """Return the engine's process."""
        return psutil.Process(self.engine._process.pid)  # type: ignore[union-attr]

    def faults(self) -> list[Fault]:
        tiers, away, filler = self.disk / "tiers", self.disk / "away", self.disk / "others"

        def move() -> None:
            tiers.rename(away)

        def move_back() -> None:
            shutil.rmtree(tiers, ignore_errors=True)
            away.rename(tiers)

        return [
            Fault("disk full", "disk", lambda: _fill(filler), filler.unlink),
            Fault("disk frozen", "disk", lambda: _freeze(self.disk, "-f"), lambda: _freeze(self.disk, "-u")),
            Fault("directory moved", "disk", move, move_back),
            Fault("I/O errors", "errors", self.switch.touch, self.switch.unlink),
            Fault("Redis stopped", "redis", self.server.pause, self.server.resume),
            Fault("Redis killed", "redis", self.server.kill, self.server.start),
            Fault("I/O process killed", "process", self._kill_io_process),
        ]

    def engine_kill(self) -> Fault:
        """Return the fault that kills the engine, which happens less often than others."""
        return Fault("engine killed", "engine", self._kill_engine)

    def _kill_io_process(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self.process().children():
                if "kvstore.runtime.child" in child.cmdline():
                    child.kill()

    def _kill_engine(self) -> None:
        self.killed.set()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process().kill()


class Traffic:
    """Asks an engine random prompts, again and again, and compares every answer."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._prompts, self._answers, self._rng = prompts, answers, rng

    def ask(self, engine: Engine) -> None:
        """Ask one batch."""
        chosen = self._rng.sample(range(len(self._prompts)), self._rng.randint(1, BATCH_MAX))
        began = time.monotonic()
        found = engine.call("ask", [self._prompts[index] for index in chosen], ANSWER_TOKENS)
        took_s = time.monotonic() - began
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > BATCH_LIMIT_S:
            failed(f"a batch took {took_s:.0f} s; prompts {chosen}")
        for index, answer in zip(chosen, found, strict=True):
            right = self._answers[index]
            if answer["tokens"][: len(right)] != right:
                failed(f"prompt {index}, {answer['cached']} cached tokens: got {answer['tokens']}, right is {right}")
        self.counts["answers"] += len(chosen)
        self.counts["cached tokens"] += sum(answer["cached"] for answer in found)


def main() -> None:
    """Command line; prints the figure or the failure as its last line."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="time under faults")
    parser.add_argument("--seed", type=int, default=0, help="random unless given")
    args = parser.parse_args()
    seed = args.seed or fresh_seed()
    print(f"seed {seed}", flush=True)
    if os.geteuid():
        not_run("mounts need root")
    try:
        binary("redis")
    except CannotStartError as error:
        not_run(str(error))
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvstore-chaos-") as directory:
        work = Path(directory)
        server = plain("redis", work / "redis", memory="12mb")
        with running(server), ext4(work, 64 << 20) as disk:
            rig = Rig(work, disk, server, rng)
            try:
                figure = campaign(rig, rng, 60 * args.minutes)
            except EngineError as error:
                failed(f"seed {seed}: the engine ended: {str(error)[-3000:]}")
            finally:
                if rig.engine is not None:
                    rig.engine.kill()
            if users := subprocess.run(["fuser", "-m", str(disk)], capture_output=True, text=True).stdout.strip():
                failed(f"seed {seed}: processes {users} still use the disk")
    passed(f"{figure}; seed {seed}")


def campaign(rig: Rig, rng: random.Random, seconds: float) -> str:
    """Run traffic under faults for a while, then without; return the figure."""
    prompts = [prompt.tokens for _ in range(2) for prompt in plan_prompts(rng.randrange(1 << 30))]
    answers = rig.right_answers(prompts)
    certain, all_tokens = sum(map(len, answers)), len(prompts) * ANSWER_TOKENS
    print(f"{certain} certain tokens of {all_tokens}", flush=True)
    if certain < all_tokens / 2:
        failed("most answers are near ties, which are not compared")
    traffic = Traffic(prompts, answers, random.Random(rng.random()))
    weather_seen: Counter[str] = Counter()
    growths: list[float] = []
    left_s, lives, is_last = seconds, 0, False
    while not is_last:
        lives += 1
        engine = rig.start()
        for _ in range(CALM_BATCHES):
            traffic.ask(engine)
        first = census(rig)
        life_s = rng.expovariate(1 / KILL_ENGINE_S)
        is_last = life_s >= left_s
        life_s = min(life_s, left_s)
        left_s -= life_s
        memory = live(rig, traffic, weather_seen, life_s, kill=not is_last)
        sizes = [size >> 20 for size in memory[:: max(1, len(memory) // 8)]]
        print(f"resident memory of engine {lives} over its life: {sizes} MiB", flush=True)
        if life_s >= 2 * WARM_S:
            warm = int(len(memory) * WARM_S / life_s)
            growths.append(growth(memory[warm:]))
            if growths[-1] > GROWTH_MAX:
                failed(f"resident memory of engine {lives} grew by {growths[-1]:.1%}")
        print(f"life {lives}: {life_s:.0f} s, {dict(traffic.counts)}, {dict(weather_seen)}", flush=True)
    from_tiers = recovered(rig, traffic)
    end_of_life(rig, first)
    memory_text = f"resident memory {max(growths):+.1%}" if growths else "lives too short to judge memory"
    return (
        f"0 wrong of {traffic.counts['answers']:,} answers, {traffic.counts['cached tokens']:,} cached tokens, "
        f"{from_tiers:,} blocks loaded from tiers by the last engine, slowest batch {traffic.slowest_s:.1f} s, "
        f"{lives} engines, {memory_text}, {dict(weather_seen)}"
    )


def live(rig: Rig, traffic: Traffic, seen: Counter[str], life_s: float, *, kill: bool) -> list[int]:
    """Ask under faults until the engine's life is over; return its resident memory over time."""
    weather = Weather(rig.faults(), random.Random(rig.rng.random()))
    weather.start()
    memory, until = [], time.monotonic() + life_s
    killer = threading.Timer(life_s, rig.engine_kill().begin) if kill else None
    if killer is not None:
        killer.start()
    try:
        while killer is not None or time.monotonic() < until:
            traffic.ask(rig.engine)  # type: ignore[arg-type]
            memory.append(rig.process().memory_info().rss)
    except (EngineError, OSError, psutil.NoSuchProcess):
        if not rig.killed.is_set():
            raise
        seen["engine killed"] += 1
    finally:
        if killer is not None:
            killer.cancel()
            killer.join()
        weather.stop()
        seen += weather.counts
        if rig.killed.is_set() and rig.engine is not None:
            rig.engine.kill()
    return memory


def recovered(rig: Rig, traffic: Traffic) -> int:
    """Ask without faults until both tiers load blocks again; return the blocks that they have loaded."""
    engine = rig.engine
    assert engine is not None
    before = _loaded(engine)
    deadline = time.monotonic() + 120
    while True:
        traffic.ask(engine)
        now = _loaded(engine)
        if all(now[name] > before[name] for name in now):
            return sum(now.values())
        if time.monotonic() > deadline:
            failed(f"two minutes after the last fault a tier is not used: loaded {before} and now {now}")


def end_of_life(rig: Rig, first: Counter[str]) -> None:
    """Check that an idle engine holds nothing, and that nothing is left of it after its end."""
    engine = rig.engine
    assert engine is not None
    engine.call("settle")
    stats = engine.call("manager_stats")
    primary = stats["primary"]
    held = {name: stats[name] for name in ("jobs", "requests", "promoting")}
    held |= {name: primary[name] for name in ("pinned", "writing", "abandoned")}
    held["lost"] = primary["slots"] - primary["free"] - primary["ready"]
    held["errors"] = engine.call("tier_errors")
    if any(held.values()):
        failed(f"the idle engine holds {held}")
    last = census(rig)
    if leaked := {name: f"{first[name]} to {last[name]}" for name in last if last[name] > first[name] + SLACK[name]}:
        failed(f"leaked: {leaked}")
    print(f"census: {dict(first)} to {dict(last)}", flush=True)
    children = rig.process().children(recursive=True)
    engine.close()
    if alive := [child.pid for child in children if child.is_running()]:
        failed(f"processes {alive} outlived the engine")
    if engine.shared_memory:
        failed(f"left in /dev/shm: {engine.shared_memory}")
    if left := [path.name for path in rig.scratch.iterdir() if "kvstore" in path.name]:
        failed(f"left in the temporary directory: {left}")


SLACK: Final = {"threads": 20, "processes": 0, "files": 8, "sockets": 8}
"""What may be more at the end: worker threads start when they are needed, and so do connections and open segments."""


def census(rig: Rig) -> Counter[str]:
    """Count descriptors, threads and processes of the engine."""
    counts: Counter[str] = Counter()
    process = rig.process()
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            counts["processes"] += 1
            counts["threads"] += one.num_threads()
            for link in _descriptors(one.pid):
                counts["sockets" if link.startswith("socket:") else "files"] += 1
    return counts


def growth(memory: list[int]) -> float:
    """Return how much more memory the last fifth of a time has than its first."""
    fifth = max(1, len(memory) // 5)
    return statistics.median(memory[-fifth:]) / statistics.median(memory[:fifth]) - 1


def _descriptors(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            yield os.readlink(entry)


def _loaded(engine: Engine) -> dict[str, int]:
    stats: dict[str, Any] = engine.call("manager_stats")
    return {tier["name"]: tier["loaded"] for tier in stats["tiers"]}


def _fill(path: Path) -> None:
    """Take all free space of a filesystem, as another program does."""
    with path.open("wb") as file:
        size = 0
        for piece in (1 << 20, 1 << 16, 4096):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), size, piece)
                    size += piece


def _freeze(point: Path, option: str) -> None:
    subprocess.run(["fsfreeze", option, str(point)], check=True)


if __name__ == "__main__":
    # A shell starts background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    main()
