"""Forgetting a tenant whose blocks are in packs: it succeeds only when the bucket has none of them any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.testing import TierRig
from kvstore.types import LookupResult
from tests.s3.clients import NAMESPACE, options_for
from tests.s3.fault_server import Fault, FaultServer

_KEYS = [b"tenant-1" + bytes([number]) * 24 for number in range(4)]
_OTHERS = [b"tenant-2" + bytes([number]) * 24 for number in range(4)]


class Engines:
    """Engines on one bucket that look for packs of each other only once."""

    def __init__(self, server: FaultServer, stack: ExitStack) -> None:
        options = {"backend": "s3", "pack_below": 1 << 20, "pack_refresh": 3600, "tries": 1, "breaker_cooldown": 0.01}
        self._config = options_for(server, **options)
        self._stack = stack

    def start(self) -> TierRig:
        """Start another engine."""
        return self._stack.enter_context(
            TierRig(self._config, namespace=NAMESPACE, slot_bytes=4096, slots=8, timeout_s=60)
        )

    def check_forgotten(self) -> None:
        """Check that a new engine finds the blocks of the other tenant only."""
        rig = self.start()
        assert [rig.lookup(key) for key in _KEYS] == [LookupResult.MISS] * 4
        assert rig.load(_OTHERS).success


@pytest.fixture
def engines(faults: FaultServer) -> Iterator[Engines]:
    """Return engines that are closed at the end of the test."""
    with ExitStack() as stack:
        yield Engines(faults, stack)


def test_a_failed_note_of_removals_is_written_again(faults: FaultServer, engines: Engines) -> None:
    """While the note can't be written, the tenant is not forgotten."""
    rig = engines.start()
    assert rig.store([*_KEYS, *_OTHERS]).success
    faults.plan(Fault.INTERNAL, methods=("PUT",))
    for _ in range(3):
        assert rig.tier.forget(b"tenant-1") is False
        rig.until(lambda: rig.tier.stats().last_error, "the failure")
    faults.plan(None)
    rig.until(lambda: rig.tier.forget(b"tenant-1"), "the tenant to be forgotten")
    assert [rig.lookup(key) for key in _KEYS] == [LookupResult.MISS] * 4
    engines.check_forgotten()


def test_blocks_that_another_engine_has_just_packed_are_forgotten(engines: Engines) -> None:
    """The bucket is listed, not the packs that the engine has read so far."""
    first, second = engines.start(), engines.start()
    assert second.lookup(_KEYS[0]) is LookupResult.MISS
    assert first.store([*_KEYS, *_OTHERS]).success
    second.until(lambda: second.tier.forget(b"tenant-1"), "the tenant to be forgotten")
    engines.check_forgotten()


def test_copies_of_two_engines_are_forgotten(engines: Engines) -> None:
    """Engines without a listing of each other's packs store the same blocks twice, and both copies leave."""
    first, second = engines.start(), engines.start()
    assert second.lookup(_KEYS[0]) is LookupResult.MISS
    assert first.store([*_KEYS, *_OTHERS]).success
    assert second.store(_KEYS).success
    second.until(lambda: second.tier.forget(b"tenant-1"), "the tenant to be forgotten")
    engines.check_forgotten()
