"""The I/O process is killed under load: every job is reported, and every byte is right."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from pathlib import Path

import pytest

from kvstore import Namespace, TransferJob, open_tier
from kvstore.runtime.process import ProcessChannel
from kvstore.testing.seeds import fresh_seed
from tests.sizes import sized
from tests.torture.blocks import key_of, payload_of

pytestmark = [pytest.mark.torture, pytest.mark.timeout(300)]

KILLS = sized(2, full=20)
"""Number of kills of the I/O process."""


class Load:
    """A tier with an I/O process and jobs always in flight."""

    slot_bytes = 16384
    blocks = 8
    lanes = 4

    def __init__(self, path: Path, rng: random.Random) -> None:
        fd = os.memfd_create("kvstore-test")
        size = self.lanes * self.blocks * self.slot_bytes
        os.ftruncate(fd, size)
        self.memory = mmap.mmap(fd, size)
        os.close(fd)
        self.view = memoryview(self.memory)
        self.slots = [self.view[at : at + self.slot_bytes] for at in range(0, size, self.slot_bytes)]
        self.rng = rng
        config = {"backend": "file", "path": str(path), "capacity": "8MiB", "reserve": 0, "io": "process"}
        namespace = Namespace({"model": "m"})
        self.tier = open_tier(config, primary=self.view, slot_bytes=self.slot_bytes, namespace=namespace)
        self.running: dict[int, tuple[str, int, list[int]]] = {}
        self.free = list(range(self.lanes))
        self.jobs = 0
        self.succeeded = 0
        self.loaded = 0

    @property
    def pid(self) -> int | None:
        """Return the process id of the I/O process, if there is one."""
        channel = self.tier._channel
        assert isinstance(channel, ProcessChannel)
        return channel.pid

    def step(self, submit: bool = True) -> None:
        """Submit jobs and check finished ones."""
        while submit and self.free:
            lane = self.free.pop()
            numbers = self.rng.sample(range(300), self.blocks)
            self.jobs += 1
            kind = self.rng.choice(["store", "load"])
            slots = range(lane * self.blocks, (lane + 1) * self.blocks)
            for slot, number in zip(slots, numbers, strict=True):
                content = payload_of(number, self.slot_bytes) if kind == "store" else b"\xee" * self.slot_bytes
                self.slots[slot][:] = content
            self.running[self.jobs] = kind, lane, numbers
            job = TransferJob(self.jobs, [key_of(n) for n in numbers], slots)
            (self.tier.submit_store if kind == "store" else self.tier.submit_load)(job)
        for result in self.tier.get_finished():
            kind, lane, numbers = self.running.pop(result.job_id)
            good = set(result.successful_keys)
            self.succeeded += bool(good)
            for place, number in enumerate(numbers):
                if kind == "load" and key_of(number) in good:
                    self.loaded += 1
                    content = bytes(self.slots[lane * self.blocks + place])
                    assert content == payload_of(number, self.slot_bytes), f"wrong bytes of block {number}"
            self.free.append(lane)
        self.tier._channel.wait(0.002)


def test_kills_of_the_io_process(tmp_path: Path) -> None:
    """After each kill of the I/O process, all jobs are reported, no byte is wrong, and a new process soon serves."""
    seed = fresh_seed()
    load = Load(tmp_path, random.Random(seed))
    for kill in range(KILLS):
        until = time.monotonic() + load.rng.uniform(0.0, 0.1)
        while time.monotonic() < until:
            load.step()
        victim = load.pid
        assert victim is not None, (seed, kill)
        os.kill(victim, signal.SIGKILL)
        started, before = time.monotonic(), load.succeeded
        # Results that were sent before the kill don't count: a new process has to be at work.
        while load.pid in (None, victim) or load.succeeded == before:
            load.step()
            if load.pid in (None, victim):
                before = load.succeeded
            assert time.monotonic() < started + 60, (seed, kill, "no service within a minute")
        print(f"service back after {time.monotonic() - started:.2f} s")
    deadline = time.monotonic() + 60
    # On a slow machine, no load may have found a stored block yet.
    while not load.loaded:
        load.step()
        assert time.monotonic() < deadline, (seed, "nothing can be loaded")
    while load.running:
        load.step(submit=False)
        assert time.monotonic() < deadline, (seed, "jobs that were never reported", load.running)
    load.tier.close()
