"""A tier that several threads use, each waiting for its calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from kvstore import ConfigError, Namespace, SimpleBackend
from kvstore.backends.vectored import scatter
from kvstore.tiers.async_tier import AsyncTier
from kvstore.tiers.threaded import ThreadedTier

SLOT_BYTES = 4096
SLOTS = 64


class Shared(SimpleBackend):
    """Records in a dict, on a medium that other engines may use; its answers can be withheld."""

    name = "shared"
    records: ClassVar[dict[bytes, bytes]] = {}
    is_silent: ClassVar[bool] = False

    async def put_one(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        record = b"".join(buffers)
        return self.records.setdefault(key, record) is record

    async def get_one_into(self, key: bytes, buffers: Sequence[memoryview]) -> int | None:
        await self._answer()
        record = self.records.get(key)
        return None if record is None else scatter(record, buffers)

    async def exists_one(self, key: bytes) -> bool:
        await self._answer()
        return key in self.records

    async def delete_one(self, key: bytes) -> bool:
        return self.records.pop(key, None) is not None

    async def _answer(self) -> None:
        if self.is_silent:
            await asyncio.Event().wait()


SHARED = {"backend": f"{__name__}:Shared"}


@pytest.fixture
def memory() -> bytearray:
    """The memory of the tier."""
    return bytearray(SLOTS * SLOT_BYTES)


@pytest.fixture
def opened(memory: bytearray) -> Iterator[Callable[..., ThreadedTier]]:
    """Open tiers, and close them at the end."""
    Shared.records.clear()
    Shared.is_silent = False
    made: list[ThreadedTier] = []
    before = set(threading.enumerate())

    def open_one(config: dict[str, Any], **options: Any) -> ThreadedTier:
        tier = ThreadedTier(
            {**config, **options}, primary=memory, slot_bytes=SLOT_BYTES, namespace=Namespace({"model": "m"})
        )
        made.append(tier)
        return tier

    yield open_one
    for tier in made:
        tier.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("kvstore-")]


def key(number: int) -> bytes:
    """Return a block's key."""
    return b"key" + number.to_bytes(4, "big")


@pytest.mark.parametrize("config", [{"backend": "memory", "capacity": "4MiB"}, SHARED], ids=["authoritative", "shared"])
def test_threads_get_their_own_blocks(
    opened: Callable[..., ThreadedTier], memory: bytearray, config: dict[str, Any]
) -> None:
    """Each of eight threads finds the blocks that it stored, and no others."""
    tier = opened(config)

    def work(thread: int) -> bool:
        first = thread * 8
        for turn in range(20):
            keys = [key(thread * 1000 + turn * 4 + i) for i in range(4)]
            for i in range(4):
                memory[(first + i) * SLOT_BYTES : (first + i + 1) * SLOT_BYTES] = bytes([thread, turn, i, 7]) * 1024
            if tier.store(keys, range(first, first + 4)) != [True] * 4:
                return False
            if tier.lookup([*keys, b"absent"]) != [True] * 4 + [False]:
                return False
            if tier.load([*keys, b"absent"], range(first + 3, first + 8)) != [True] * 4 + [False]:
                return False
            loaded = memory[(first + 3) * SLOT_BYTES : (first + 7) * SLOT_BYTES]
            if loaded != b"".join(bytes([thread, turn, i, 7]) * 1024 for i in range(4)):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert tier.stats().bytes_loaded == 8 * 20 * 4 * SLOT_BYTES


def test_an_unanswered_lookup_is_a_miss_at_its_deadline(opened: Callable[..., ThreadedTier]) -> None:
    """A medium that does not answer delays a lookup no longer than the tier's limit."""
    tier = opened(SHARED, lookup_timeout=0.05)
    Shared.is_silent = True
    assert tier.lookup([key(1)]) == [False]


def test_answers_that_do_not_last_end_the_lookup(opened: Callable[..., ThreadedTier]) -> None:
    """With answers that are stale at once, a lookup still ends at its deadline."""
    tier = opened(SHARED, lookup_timeout=0.05, positive_ttl=0, negative_ttl=0)
    assert tier.lookup([key(1)]) == [False]


class Unsure(Shared):
    """Answers each query at once, but for no block."""

    async def exists(self, keys: Sequence[bytes]) -> list[bool | None]:  # type: ignore[override]
        return [None] * len(keys)


def test_unanswered_lookup_ends_at_its_deadline(opened: Callable[..., ThreadedTier]) -> None:
    """If each query is answered at once, but not for every block, a lookup still ends at its deadline."""
    tier = opened({"backend": f"{__name__}:Unsure"}, lookup_timeout=0.1, negative_ttl=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(tier.lookup, [key(1)])
        try:
            assert waiting.result(30) == [False]
        finally:
            tier.close()


def test_close_ends_waiting_calls(opened: Callable[..., ThreadedTier]) -> None:
    """A call that waits when the tier is closed returns a miss, as do all later calls."""
    tier = opened(SHARED, lookup_timeout=60)
    Shared.is_silent = True
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(tier.lookup, [key(1)])
        while not tier.stats().lookups.get("retry"):
            assert not waiting.done()
        tier.close()
        assert waiting.result() == [False]
    assert tier.store([key(1)], [0]) == tier.lookup([key(1)]) == tier.load([key(1)], [0]) == [False]
    assert not tier.clear(1.0)
    tier.remove([key(1)])
    tier.close()


@pytest.mark.parametrize("method", ["get_finished", "lookup", "flush"])
def test_an_unexpected_error_ends_in_misses(
    opened: Callable[..., ThreadedTier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """A defect in the tier is logged; no thread waits for an answer that never comes."""
    tier = opened(SHARED, lookup_timeout=60)
    Shared.is_silent = True
    caller, works = threading.get_ident(), getattr(AsyncTier, method)

    def fail(self: AsyncTier, *arguments: Any) -> Any:
        if threading.get_ident() != caller:  # The tier's own thread.
            raise RuntimeError("a defect")
        return works(self, *arguments)

    monkeypatch.setattr(AsyncTier, method, fail)
    assert tier.lookup([key(1)]) == [False]
    monkeypatch.undo()
    Shared.is_silent = False
    assert tier.store([key(1)], [0]) == [False]
    assert "a defect" in caplog.text


def test_clear_removes_every_block(opened: Callable[..., ThreadedTier]) -> None:
    """After a clear no block is found; new ones can be stored."""
    tier = opened({"backend": "memory", "capacity": "4MiB"})
    assert tier.store([key(1), key(2)], [0, 1]) == [True, True]
    assert tier.clear(30.0)
    assert tier.lookup([key(1), key(2)]) == [False, False]
    assert tier.store([key(1)], [0]) == [True]
    assert tier.lookup([key(1), key(2)]) == [True, False]


def test_a_clear_that_the_medium_cannot_do_leaves_the_tier_empty(opened: Callable[..., ThreadedTier]) -> None:
    """If the medium can't list its blocks, a clear fails, and the tier neither finds nor stores any."""
    tier = opened(SHARED)
    assert tier.store([key(1)], [0]) == [True]
    assert not tier.clear(0.05)
    assert tier.lookup([key(1)]) == tier.load([key(1)], [0]) == tier.store([key(2)], [0]) == [False]


def test_removed_blocks_are_misses(opened: Callable[..., ThreadedTier]) -> None:
    """A removed block is gone; others stay."""
    tier = opened({"backend": "memory", "capacity": "4MiB"})
    assert tier.store([key(1), key(2)], [0, 1]) == [True, True]
    tier.remove([key(1), key(3)])
    assert tier.lookup([key(1), key(2)]) == [False, True]


def test_an_io_process_is_refused(opened: Callable[..., ThreadedTier]) -> None:
    """Another framework's memory can't be mapped by an I/O process."""
    with pytest.raises(ConfigError, match=r"\"io\" is \"process\". Expected \"thread\".* Leave the option out"):
        opened({"backend": "memory", "capacity": "4MiB"}, io="process")
