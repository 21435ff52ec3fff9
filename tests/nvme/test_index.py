"""The index and the slots' descriptors: what a batch notes is what its blocks would note one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.backends.nvme.free_slots import SLAB_SHIFT
from kvstore.backends.nvme.index import Index
from kvstore.backends.nvme.layout import PAGE, decode_descriptor, encode_descriptor, is_named
from kvstore.eviction import make_policy
from kvstore.testing.seeds import fresh_seed
from kvstore.types import KEY_BYTES_MAX

_SLOTS = 64
_DIGEST = bytes(range(32))


def _index(slabs: int) -> Index:
    index = Index(make_policy("lru", slabs * _SLOTS), [_SLOTS] * slabs, _DIGEST)
    for slab in range(slabs):
        index.open_free_slots(slab)
    return index


@pytest.mark.parametrize("longest", [1, 36, KEY_BYTES_MAX])
@pytest.mark.parametrize("slabs", [1, 3])
def test_a_batch_is_noted_like_its_blocks(slabs: int, longest: int) -> None:
    """Batches of blocks leave the same slots, rows and order of eviction behind as the same blocks one by one."""
    seed = fresh_seed()
    rng = random.Random(seed)
    one, many = _index(slabs), _index(slabs)
    keys = list({rng.randbytes(rng.randint(1, longest)) for _ in range(_SLOTS)})
    while keys:
        batch = [keys.pop() for _ in range(min(len(keys), rng.randint(1, 20)))]
        slots, _ = one.reserve(len(batch))
        assert many.reserve(len(batch))[0] == slots, f"seed {seed}"
        sizes = [rng.randrange(1, 1 << 31) for _ in batch]
        for key, slot, size in zip(batch, slots, sizes, strict=True):
            one.add(key, slot, size)
        many.add_all(batch, slots, sizes)
    assert many.own_keys() == one.own_keys(), f"seed {seed}"
    assert (len(many), many.changes) == (len(one), one.changes), f"seed {seed}"
    for key in one.own_keys():
        slot = one.find(key)
        assert slot is not None
        assert many.find(key) == slot, f"seed {seed}"
        assert many.size_bytes(slot) == one.size_bytes(slot), f"seed {seed}"
        assert many.name_in(slot) == key, f"seed {seed}"
    for slab in range(slabs):
        theirs, ours = (index.snapshot(slab, b"", 1) for index in (one, many))
        assert np.array_equal(theirs.slots, ours.slots), f"seed {seed}"
        for column in ("key", "size", "namespace", "key_length"):
            assert theirs.rows[column].tobytes() == ours.rows[column].tobytes(), f"seed {seed}"
        # Which of two slabs was used earlier within a batch is nobody's business; the order within a slab is.
        assert (np.diff(ours.rows["used"].astype(np.int64)) > 0).all(), f"seed {seed}"
    assert one.reserve(slabs * _SLOTS)[1] == many.reserve(slabs * _SLOTS)[1], f"seed {seed}"


def test_an_empty_batch_changes_nothing() -> None:
    """A batch of which no block was written notes none."""
    index = _index(2)
    index.add_all([], [], [])
    assert (len(index), index.changes) == (0, 0)


def test_a_page_names_one_block_only() -> None:
    """Key, its length and namespace all have to be right, and an empty page names no block."""
    page = memoryview(bytearray(PAGE))
    assert not is_named(page, _DIGEST, b"key")
    encode_descriptor(page, b"s" * 16, 7, 256, 3, 5000, _DIGEST, b"key")
    found = decode_descriptor(page, b"s" * 16, 7)
    assert found is not None
    assert (found.epoch, found.record_bytes, found.namespace_digest, found.key) == (3, 5000, _DIGEST, b"key")
    assert is_named(page, _DIGEST, b"key")
    for digest, key in ((bytes(32), b"key"), (_DIGEST, b"key\0"), (_DIGEST, b"ke"), (_DIGEST, b"kez")):
        assert not is_named(page, digest, key), key
    encode_descriptor(page, b"s" * 16, 1 << SLAB_SHIFT, 256, 3, 5000, _DIGEST, b"k" * KEY_BYTES_MAX)
    assert is_named(page, _DIGEST, b"k" * KEY_BYTES_MAX)
    assert not is_named(page, _DIGEST, b"key")
