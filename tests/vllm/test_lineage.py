"""Payloads of events across restarts, with vLLM's own event tracker and a disk tier, without a model."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
    _OffloadEventMetadata,
)
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig

from kvstore.testing import eventually
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.vllm.harness import Driver, key_of

GROUP = OffloadingEventGroupSpec("full_attention", None)
TOKENS = 16


class Scheduler:
    """The parts of vLLM's ``OffloadingConnectorScheduler`` that kvstore uses."""

    def __init__(self, *tiers: dict[str, Any], self_describing: bool = True) -> None:
        self.config = SimpleNamespace(kv_group_configs=(SimpleNamespace(kv_event_group_spec=GROUP),))
        self.driver = Driver(list(tiers), spec_class=KVStoreOffloadingSpec, events=True)
        self.driver.engine.scheduler = self
        self._events_tracker = OffloadingEventsTracker(
            OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=self_describing)
        )
        self.stored: dict[int, BlockStored] = {}
        self.removed: list[int] = []
        self.held: dict[tuple[str | None, str | None], set[Any]] = {}
        """Stated blocks by medium and locality."""

    @property
    def payloads(self) -> dict[Any, Any]:
        """The payloads that vLLM keeps for events."""
        return self._events_tracker._pending_event_metadata

    def store(self, numbers: list[int], hashes_per_key: int = 1) -> None:
        """Compute a prompt of blocks and offload it; vLLM records the payloads first."""
        parent: bytes | None = None
        for number in numbers:
            hashes = [hash_within(number, i) for i in range(1, hashes_per_key)]
            hashes.append(key_of(number)[:-4])
            self.payloads[key_of(number)] = payload_of(  # type: ignore[index]
                block_hashes=tuple(hashes), parent_block_hash=parent, token_ids=tokens_of(number, hashes_per_key)
            )
            parent = hashes[-1]
        self.driver.store([key_of(number) for number in numbers])
        self.read()

    def read(self) -> None:
        """Process all events."""
        self.driver.settle()
        events, self.driver.events[:] = list(self.driver.events), []
        for event in self._events_tracker.take_events(events):
            assert isinstance(event, BlockStored | BlockRemoved)
            held, blocks = self.held.setdefault((event.medium, event.locality), set()), set(event.block_hashes)
            assert blocks <= held if isinstance(event, BlockRemoved) else not blocks & held, "stated twice"
            held.symmetric_difference_update(blocks)
            if event.medium != "STORAGE":
                continue
            if isinstance(event, BlockStored):
                self.stored.update((block, event) for block in event.block_hashes)  # type: ignore[misc]
            elif isinstance(event, BlockRemoved):
                self.removed += event.block_hashes  # type: ignore[arg-type]
                for block in event.block_hashes:
                    self.stored.pop(block, None)  # type: ignore[call-overload]

    def clear(self) -> None:
        """Drop all blocks, as consumers do when vLLM empties the device's cache."""
        self.held.clear()
        self.driver.manager._restate_events()

    def wait_stored(self, count: int) -> None:
        """Wait until this many blocks are stored."""
        eventually(lambda: self.read() or len(self.stored) == count, what=f"{count} blocks stored")


def payload_of(**fields: Any) -> _OffloadEventMetadata:
    """Return a payload with the fields of the running version."""
    common = {
        "block_size": TOKENS,
        "lora_id": None,
        "lora_name": "adapter",
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec": GROUP,
        "active_residencies": set(),
    }
    known = {field.name for field in dataclasses.fields(_OffloadEventMetadata)}
    return _OffloadEventMetadata(**{name: value for name, value in {**common, **fields}.items() if name in known})


def hash_within(number: int, place: int) -> bytes:
    """Return the hash of a block before the last one of a key."""
    return (1000 * place + number).to_bytes(32, "big")


def tokens_of(number: int, hashes: int = 1) -> tuple[int, ...]:
    """Return the tokens of a block."""
    return tuple(range(1000 * number, 1000 * number + TOKENS * hashes))


def encrypted(directory: Path) -> list[Any]:
    """Return a codec with a key stored beside the directory."""
    path = directory.parent / "keys.json"
    if not path.exists():
        path.touch(0o600)
        path.write_text(json.dumps({"current": 1, "keys": {"1": base64.b64encode(bytes(range(32))).decode()}}))
    return [{"aead": {"keys": {"file": str(path)}}}]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Start schedulers on one directory; each is closed before the next."""
    running: list[Scheduler] = []

    def start(*, seal: bool, **options: Any) -> Scheduler:
        stop()
        directory = tmp_path / "kv"
        tier: dict[str, Any] = {"type": "file", "path": str(directory), "capacity": "1MiB"}
        running.append(Scheduler(tier | ({"codec": encrypted(directory)} if seal else {}), **options))
        return running[-1]

    def stop() -> None:
        while running:
            running.pop().driver.close()

    start.directory = tmp_path / "kv"  # type: ignore[attr-defined]
    yield start
    stop()


def notes_of(directory: Path) -> bytes:
    """Return the content of all notes files."""
    return b"".join(path.read_bytes() for path in directory.rglob("*.notes"))


Start = Callable[..., Scheduler]


@pytest.mark.parametrize("hashes", [1, 3])
def test_an_encrypted_tier_keeps_everything(run: Start, hashes: int) -> None:
    """Recovered blocks are reported as before; a removal is reported with all hashes of the block."""
    first = run(seal=True)
    first.store([1, 2, 3], hashes)
    first.wait_stored(3 * hashes)
    before = first.stored
    again = run(seal=True)
    again.wait_stored(3 * hashes)
    assert again.stored == before
    event = again.stored[2]
    assert event.token_ids == list(tokens_of(2, hashes))
    assert (event.lora_name, event.block_size, event.group_idx) == ("adapter", TOKENS, 0)
    assert (event.kv_cache_spec_kind, event.parent_block_hash) == ("full_attention", 1)
    again.driver.manager.manager.tiers[0].remove([key_of(2)])
    again.wait_stored(2 * hashes)
    assert len(again.removed) == hashes
    third = run(seal=True)
    third.wait_stored(2 * hashes)
    assert {**third.stored, **{block: event for block in again.removed}} == before


@pytest.mark.parametrize("hashes", [1, 3])
def test_other_tiers_keep_parents_and_lengths(run: Start, hashes: int) -> None:
    """No token is on the disk; each recovered block is reported, and removed, as one block."""
    first = run(seal=False)
    first.store([1, 2, 3], hashes)
    first.wait_stored(3 * hashes)
    again = run(seal=False)
    content = notes_of(run.directory)  # type: ignore[attr-defined]
    assert content.count(b"adapter") == 0
    for width in (2, 4):
        assert tokens_of(2)[0].to_bytes(width, "little") + tokens_of(2)[1].to_bytes(width, "little") not in content
    again.wait_stored(3)
    event = again.stored[2]
    assert (event.token_ids, event.block_size, event.lora_name) == ([], TOKENS, None)
    assert event.parent_block_hash == (1 if hashes == 1 else int.from_bytes(hash_within(2, hashes - 1), "big"))
    again.store([2], hashes)  # VLLM has the tokens again; the tier has the block.
    again.driver.manager.manager.tiers[0].remove([key_of(1), key_of(3)])
    again.wait_stored(1)
    assert sorted(again.removed) == [1, 3]
    again.clear()
    again.wait_stored(hashes)
    assert again.stored[2].token_ids == list(tokens_of(2, hashes)), "not hidden by what was kept"


@pytest.mark.parametrize("locality", ["LOCAL", "REMOTE"])
def test_tiers_of_one_medium_do_not_erase_each_others_blocks(tmp_path: Path, locality: str) -> None:
    """A block is stated once per medium and locality, and vLLM keeps its payload until the last tier drops it."""
    small = {"type": "file", "path": str(tmp_path / "small"), "capacity": "192KiB"}
    large = {"type": "file", "path": str(tmp_path / "large"), "capacity": "1GiB", "locality": locality}
    scheduler = Scheduler(small, large)
    driver, payloads = scheduler.driver, scheduler.payloads
    rows = driver.slots
    everything = list(range(1, 4 * rows + 1))
    hashes = 3
    try:
        for start in range(0, len(everything), rows):
            scheduler.store(everything[start : start + rows], hashes)

        def evicts() -> bool:
            scheduler.read()
            return bool(driver.manager.manager.tier_stats()[0].removals)

        def all_held() -> bool:
            scheduler.read()
            return len(scheduler.held["STORAGE", locality]) == hashes * len(everything)

        eventually(evicts, what="evictions from the small tier")
        # The small tier may evict a block before the large one has it.
        eventually(all_held, what="all blocks in the large tier")
        assert len(payloads) == len(everything), "no payload is lost while a tier has the block"
        assert len(scheduler.held["CPU", None]) == hashes * rows
        assert scheduler.removed or locality == "LOCAL", "the small tier alone states blocks of its medium"
        driver.forget_primary()
        driver.manager.manager.tiers[0].remove([key_of(number) for number in everything])
        driver.manager.manager.tiers[1].remove([key_of(number) for number in everything])

        def empty() -> bool:
            scheduler.read()
            return not any(scheduler.held.values())

        eventually(empty, what="every hash of every block is stated as removed")
        assert not payloads
    finally:
        driver.close()


def test_damaged_and_foreign_notes_are_ignored(run: Start) -> None:
    """Every block is still reported, and an encrypting tier trusts no unencrypted note."""
    first = run(seal=True)
    first.store([1, 2, 3])
    first.wait_stored(3)
    first.driver.close()
    [path] = run.directory.rglob("*.notes")  # type: ignore[attr-defined]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    again = run(seal=True)
    again.wait_stored(3)
    assert [len(event.token_ids) for event in again.stored.values()].count(TOKENS) < 3
    unsealed = run(seal=False)
    unsealed.store([4])
    unsealed.wait_stored(4)
    last = run(seal=True)
    last.wait_stored(4)
    assert (last.stored[4].token_ids, last.stored[4].parent_block_hash) == ([], None)


def test_a_payload_that_vllm_has_dropped_is_no_error(run: Start) -> None:
    """A restored block may have left vLLM's bookkeeping by the next report."""
    first = run(seal=False)
    first.store([1, 2])
    first.wait_stored(2)
    again = run(seal=False)
    again.wait_stored(2)
    again.payloads.clear()
    again.read()
    assert again.driver.manager.errors.count == 0


def test_nothing_is_kept_unless_events_are_self_describing(run: Start) -> None:
    """Without self-describing events no notes are kept, because vLLM has no payloads."""
    first = run(seal=False, self_describing=False)
    first.store([1, 2])
    first.wait_stored(2)
    again = run(seal=False)
    again.wait_stored(2)
    assert notes_of(run.directory) == b""  # type: ignore[attr-defined]
    assert again.stored[1].block_size == 0
