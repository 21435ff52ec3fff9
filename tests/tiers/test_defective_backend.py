"""A third-party backend with defects: it raises forbidden exceptions in all of its methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import pytest

from kvstore.backends.base import BlockInfo, RecordWrite
from kvstore.backends.memory import MemoryBackend
from kvstore.namespace import Namespace
from kvstore.testing import TierRig
from kvstore.types import BlockKey, LookupResult, Outcome

DEFECT = "a defect, not an error of the medium"


class Defective(MemoryBackend):
    """Raises a TypeError in the selected methods."""

    authoritative = False  # So that lookups query it.
    broken: ClassVar[set[str]] = set()

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self._strike("exists")
        return await super().exists(keys)

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        self._strike("put")
        return await super().put(writes)

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self._strike("delete")
        return await super().delete(keys)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        self._strike("scan")
        async for info in super().scan():
            yield info

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._strike("touch")
        super().touch(keys)

    def _strike(self, method: str) -> None:
        if method in self.broken:
            raise TypeError(DEFECT)


@pytest.fixture
def broken() -> set[str]:
    """The methods that raise; none at first."""
    Defective.broken.clear()
    return Defective.broken


def open_rig() -> TierRig:
    """Open a tier over the defective backend, with a breaker that opens and is probed immediately."""
    config = {"backend": f"{__name__}:Defective", "breaker_failures": 1, "positive_ttl": "1ms", "negative_ttl": "1ms"}
    config |= {"breaker_cooldown": "10ms", "breaker_cooldown_max": "20ms"}
    return TierRig(config, namespace=Namespace({"model": "m"}), slot_bytes=4096, slots=8)


def test_questions_are_answered_and_the_tier_comes_back(broken: set[str]) -> None:
    """A defect in ``exists`` is a miss and opens the breaker; continued probes finally close it."""
    with open_rig() as rig:
        assert rig.store([b"a"]).success
        broken.add("exists")
        rig.until(lambda: rig.tier.lookup(b"a") is LookupResult.MISS, "a miss")
        rig.until(lambda: rig.tier.stats().load_breaker == "open", "an open breaker")
        assert DEFECT in rig.tier.stats().last_error
        broken.clear()
        rig.until(lambda: rig.tier.lookup(b"a") is LookupResult.HIT, "the tier's return")
        assert rig.load([b"a"]).success


def test_a_job_that_meets_a_defect_is_an_error_of_the_medium(broken: set[str]) -> None:
    """A defect in ``put`` fails the blocks immediately, without a timeout, and is counted; the tier continues."""
    with open_rig() as rig:
        broken.add("put")
        assert rig.store([b"a", b"b"]).outcomes == (Outcome.IO_ERROR, Outcome.IO_ERROR)
        assert DEFECT in rig.tier.stats().last_error
        broken.clear()
        rig.until(lambda: rig.store([b"a"]).success, "the tier's return")


def test_jobs_behind_a_defect_are_done(broken: set[str]) -> None:
    """A defect in ``touch`` loses no jobs sent with it."""
    with open_rig() as rig:
        assert rig.store([b"a"]).success
        broken.add("touch")
        rig.tier.touch([b"a"])
        assert rig.load([b"a"]).success


def test_failed_delete_is_a_warning(broken: set[str]) -> None:
    """A defect in ``delete`` is a warning."""
    with open_rig() as rig:
        assert rig.store([b"a"]).success
        broken.add("delete")
        rig.tier.remove([b"a"])
        assert rig.store([b"b"]).success
        assert rig.load([b"b"]).success


def test_a_scan_that_fails_ends_recovery(broken: set[str]) -> None:
    """After a defect in ``scan`` the tier is no longer recovering, and queries the medium."""
    broken.add("scan")
    with open_rig() as rig:
        rig.until(lambda: not rig.tier.stats().recovering, "the end of recovery")
        assert rig.lookup(b"a") is LookupResult.MISS
        assert rig.store([b"a"]).success
        assert rig.lookup(b"a") is LookupResult.HIT
