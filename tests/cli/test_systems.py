"""Measured systems, and their removal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore import Namespace
from kvstore.backends.memory import MemoryBackend
from kvstore.cli.bench.driver import Driver
from kvstore.cli.bench.payload import Payload
from kvstore.cli.bench.systems import RawSystem, TierSystem
from kvstore.cli.bench.workload import Mix, Workload
from kvstore.primary import Region
from kvstore.types import Outcome
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.redis.servers import cli, plain, running

BLOCK = 8192
REMOVED: list[bytes] = []


class SlowlyForgetting(MemoryBackend):
    """A backend with slow deletions."""

    async def delete(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Delete after a while."""
        await asyncio.sleep(0.2)
        REMOVED.extend(keys)
        return await super().delete(keys)


@pytest.fixture
def region() -> Iterator[Region]:
    """Return eight slots."""
    with Region.create(8, BLOCK) as region:
        yield region


def test_remove_returns_after_the_medium_removed_the_blocks(region: Region) -> None:
    """``remove`` returns when the medium has removed the blocks, however long that takes."""
    REMOVED.clear()
    config = {"backend": f"{__name__}:SlowlyForgetting", "capacity": "1MiB"}
    system = TierSystem(config, region.view(), BLOCK, Namespace({"test": 1}), name="slow")
    try:
        keys = [bytes([i]) * 32 for i in range(8)]
        system.submit("store", 1, keys, range(8))
        system.remove(keys)
    finally:
        system.close()
    # Blocks that a store wrote during the removal are removed again.
    assert REMOVED[-len(keys) :] == keys and set(REMOVED) == set(keys)


def test_nothing_stays_on_a_server(tmp_path: Path) -> None:
    """``verify`` and ``run`` on a server leave no keys."""
    with running(plain("redis", tmp_path)) as (server,):
        for command in (["verify", "--bytes", "4MiB"], ["run", "--ops", "20", "--working-set", "4MiB", "-b", "64KiB"]):
            done = run_here("bench", *command, "-t", server.url, "--reuse", "--json")
            assert done.returncode == 0, done.stderr
            assert report_of(done)["rows"][0]["verified"]
            assert cli(server, "DBSIZE").strip() == "0"


def test_baseline_on_the_bare_drive_verifies_its_reads(tmp_path: Path, region: Region) -> None:
    """The baseline's own reads and writes are verified like a tier's, and blocks without room are misses."""
    rows = Payload("random", BLOCK, 1).prepare(region)
    system = RawSystem(tmp_path, region.view(), BLOCK, 40)
    try:
        phase = Workload(
            BLOCK, blocks_per_job=4, jobs=2, mix=Mix(0.3), ops_max=60, warmup_s=0, working_set_bytes=16 * BLOCK,
            verify="all", duration_s=30,
        )  # fmt: skip
        driver = Driver(system, rows)
        driver.fill(phase)
        found = driver.run(phase)
        assert found.load.jobs + found.store.jobs == 60
        assert found.verified_blocks > 50 and not found.wrong and not found.load.errors
        system.submit("load", 9999, [b"never stored"], [0])
        while not (done := system.finished()):
            pass
        assert done[0].outcomes == [Outcome.MISS]
    finally:
        system.close()
        rows.release()
    assert list(tmp_path.iterdir()) == []
