"""Forgetting a tenant on media that cannot do it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import pytest

from kvstore import BlockInfo, Namespace, SimpleBackend
from kvstore.backends.vectored import scatter
from kvstore.testing import TierRig
from kvstore.types import LookupResult

_KEYS = [b"tenant-1" + bytes([number]) * 24 for number in range(4)]


class Unlisted(SimpleBackend):
    """Records in a dict, which cannot be listed."""

    name = "unlisted"
    records: ClassVar[dict[bytes, bytes]] = {}
    removes: ClassVar[bool] = True

    async def put_one(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        record = b"".join(buffers)
        return self.records.setdefault(key, record) is record

    async def get_one_into(self, key: bytes, buffers: Sequence[memoryview]) -> int | None:
        record = self.records.get(key)
        return None if record is None else scatter(record, buffers)

    async def exists_one(self, key: bytes) -> bool:
        return key in self.records

    async def delete_one(self, key: bytes) -> bool:
        return self.removes and self.records.pop(key, None) is not None


class UnlistedExclusive(Unlisted):
    authoritative = True


class Listed(Unlisted):
    async def scan(self) -> AsyncIterator[BlockInfo]:
        self.check_open()
        for key, record in list(self.records.items()):
            yield BlockInfo(key, len(record))


class ListedExclusive(Listed):
    authoritative = True


def _stored(kind: type[Unlisted], *, removes: bool) -> TierRig:
    """Return a tier that holds the tenant's blocks."""
    Unlisted.records.clear()
    Unlisted.removes = removes
    config = {"backend": f"{__name__}:{kind.__name__}", "breaker_cooldown": 0.01}
    rig = TierRig(config, namespace=Namespace({}), slot_bytes=4096, slots=8)
    assert rig.store(_KEYS).success
    return rig


@pytest.mark.parametrize("kind", [Unlisted, UnlistedExclusive])
def test_a_medium_without_a_list_never_forgets(kind: type[Unlisted], caplog: pytest.LogCaptureFixture) -> None:
    """Without a list of the medium, ``forget`` is never true, and says once that blocks may remain."""
    with _stored(kind, removes=True) as rig:
        for _ in range(3):
            assert rig.tier.forget(b"tenant-1") is False
            rig.until(lambda: "can't list its blocks" in caplog.text, "the reason")
        assert caplog.text.count("can't list its blocks") == 1
        assert [rig.lookup(key) for key in _KEYS] == [LookupResult.HIT] * 4


@pytest.mark.parametrize("kind", [Listed, ListedExclusive])
def test_blocks_that_stay_are_not_forgotten(kind: type[Listed]) -> None:
    """``forget`` is true only when the medium has none of the blocks any more."""
    with _stored(kind, removes=False) as rig:
        assert rig.tier.forget(b"tenant-1") is False
        rig.until(lambda: "not all blocks could be removed" in rig.tier.stats().last_error, "the failure")
        assert rig.tier.forget(b"tenant-1") is False
        Unlisted.removes = True
        rig.until(lambda: rig.tier.forget(b"tenant-1"), "the tenant to be forgotten")
        assert not Unlisted.records
        assert [rig.lookup(key) for key in _KEYS] == [LookupResult.MISS] * 4
