"""Summaries and their index: golden bytes, search results, and invalid summaries."""

from __future__ import annotations

import hashlib
import random
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.backends.peer import summary
from kvstore.backends.peer.summary import (
    ENGINES_MAX,
    SAMPLE_MAX,
    SUMMARY_BYTES_MAX,
    Index,
    Sample,
    Section,
    SummaryError,
    pack,
    unpack,
)

GOLDEN = Path(__file__).with_name("golden") / "summary-v1.bin"
GOLDEN_SHA256 = "7340e508fe4b35cc004f77d3b0186786618ab87067c8993fd530e0cb6b08853c"
PAGE = Path(__file__).parents[2] / "docs" / "peer.md"


def keys_of(name: str, count: int) -> list[bytes]:
    """Return ``count`` keys of vLLM's length."""
    return [hashlib.sha256(f"{name}-{number}".encode()).digest() + bytes(4) for number in range(count)]


def sampled(keys: list[bytes]) -> Section:
    """Return the sample of some keys, taken in two pieces."""
    sample = Sample()
    sample.add(keys[: len(keys) // 3])
    sample.add(keys[len(keys) // 3 :])
    return sample.section()


def test_the_golden_summary() -> None:
    """The same blocks give the bytes that version 1 always gave, and these decode correctly."""
    data = pack([sampled(keys_of("memory", 5000)), sampled(keys_of("storage", 3))])
    assert hashlib.sha256(GOLDEN.read_bytes()).hexdigest() == GOLDEN_SHA256
    assert data == GOLDEN.read_bytes()
    memory, storage = unpack(data)
    assert (len(memory.digests), len(storage.digests)) == (SAMPLE_MAX, 3)
    assert memory.threshold < storage.threshold == 0xFFFFFFFF


def test_the_page_covers_a_summary() -> None:
    """The tables of docs/peer.md cover the head and a section without a gap."""
    for name, length in (("summary", summary.HEAD.size), ("section", summary.SECTION.size)):
        (table,) = re.findall(rf"^### `{name}`.*?\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
        end = 0
        for offset, size in re.findall(r"^\| (\d+) \| (\d+) \| \w+ \| `\w+` \|", table, re.M):
            assert int(offset) == end
            end += int(size)
        assert end == length


@pytest.mark.torture
def test_engines_with_the_same_prefix_are_found() -> None:
    """Of a thousand full engines, the two that hold a prefix are found by it, and by most of its long parts."""
    rng = np.random.default_rng(1)
    prefix = keys_of("prefix", 250)
    summaries = [[full_section(rng, 100_000)] for _ in range(1000)]
    for place in (123, 777):
        summaries[place] = [full_section(rng, 100_000, prefix)]
    index = Index.of(summaries)
    assert sorted(index.best(prefix, 2)) == [123, 777]
    assert index.best(prefix, 2, barred=[123])[0] == 777
    parts = [prefix[start : start + 125] for start in range(125)]
    found = sum(index.best(part, 1) in ([123], [777]) for part in parts)
    assert found >= 120, f"{found} of {len(parts)}"


@pytest.mark.torture
def test_prefixes_that_no_engine_has_are_rarely_asked_for() -> None:
    """Of 1,000 prefixes of 250 blocks, at most 30 match one of a thousand engines of 100,000 blocks by chance."""
    rng = np.random.default_rng(2)
    index = Index.of([[full_section(rng, 100_000)] for _ in range(1000)])
    wrong = sum(bool(index.best(keys_of(f"absent-{number}", 250), 2)) for number in range(1000))
    assert wrong <= 30, wrong


def test_second_choice_has_the_blocks_missing_from_the_first() -> None:
    """One engine has most blocks, a second nearly as many of the same, a third the rest: the third is second choice."""
    one, two = keys_of("one", 200), keys_of("two", 40)
    index = Index.of([[sampled(one)], [sampled(one[:150])], [sampled(two)], [sampled(keys_of("none", 10))]])
    assert index.best(one + two, 2) == [0, 2]
    # The first engine holds all of these: the second is a reserve.
    assert index.best(one, 2) == [0, 1]
    assert index.best(keys_of("three", 300), 2) == []
    assert Index.of([]).best(one, 2) == []


def test_memory_and_storage_count() -> None:
    """A block in either section is found."""
    memory, storage = keys_of("memory", 20), keys_of("storage", 20)
    index = Index.of([[sampled(memory), sampled(storage)], [sampled(storage[:5])]])
    assert index.best(memory, 2) == [0]
    assert index.best(storage, 2) == [0, 1]


def test_engines_that_are_alike_share_the_work() -> None:
    """Of many engines with the same blocks, the choice varies."""
    keys = keys_of("all", 50)
    index = Index.of([[sampled(keys)] for _ in range(10)])
    assert len({engine for _ in range(200) for engine in index.best(keys, 2)}) == 10


def test_a_search_is_bounded() -> None:
    """If many engines claim the first blocks, a search looks at a bounded part, from the first key on."""
    keys = keys_of("all", 4096)
    seen = summary._MATCHES_MAX // 101
    claimed = [keys[: seen + 2]] * 100 + [keys[seen - 10 : seen], keys[seen + 2 :]]
    assert sorted(Index.of([[sampled(each)] for each in claimed]).best(keys, 102)) == [*range(101)]


def test_an_index_takes_the_memory_of_its_entries() -> None:
    """Building an index takes no second copy of its entries, however many summaries there are."""
    section = Section(0xFFFFFFFF, np.arange(SAMPLE_MAX, dtype=np.uint32))
    summaries = [[section, section]] * ENGINES_MAX
    tracemalloc.start()
    index = Index.of(summaries)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    entries_bytes = 8 * 2 * SAMPLE_MAX * ENGINES_MAX
    assert index._entries.nbytes == entries_bytes == 64 << 20
    assert peak < 1.1 * entries_bytes


def test_a_sample_is_that_of_all_keys() -> None:
    """However keys are split, the smallest hashes are kept, each once, and the threshold bounds the kept ones."""
    keys = keys_of("some", 20_000)
    hashes = sorted(int(one) for one in summary._hashes(keys))
    section = sampled([*keys, *keys[:100]])
    assert section.threshold == hashes[SAMPLE_MAX - 1] >> 32
    assert section.digests.tolist() == sorted({one & 0xFFFFFFFF for one in hashes[:SAMPLE_MAX]})
    assert len(pack([section, section])) <= SUMMARY_BYTES_MAX
    assert sampled(keys[:SAMPLE_MAX]).threshold == 0xFFFFFFFF, "the sample has all of them"


def test_invalid_summaries_are_refused() -> None:
    """A changed, cut or invented summary is refused, or has a valid checksum and a bounded size."""
    rng = random.Random(3)
    good = pack([sampled(keys_of("memory", 300)), sampled(keys_of("storage", 3))])
    for bad in (b"", good[:-1], good + b"\0", bytes(len(good)), rng.randbytes(2 * SUMMARY_BYTES_MAX)):
        with pytest.raises(SummaryError):
            unpack(bad)
    for _ in range(500):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if bytes(data[12:16]) == good[12:16]:  # Reserved bytes are ignored.
            with pytest.raises(SummaryError):
                unpack(bytes(data))
    forged = [
        [Section(0, np.array([2, 1], np.uint32))],
        [Section(0, np.array([1, 1], np.uint32))],
        [Section(0, np.arange(SAMPLE_MAX + 1, dtype=np.uint32))],
        [Section(0, np.empty(0, np.uint32))] * 3,
    ]
    for sections in forged:
        with pytest.raises(SummaryError):
            unpack(pack(sections))
    # A valid checksum, but truncated digests or surplus bytes.
    for body in (good[summary.HEAD.size : -4], good[summary.HEAD.size :] + b"\0"):
        head = (*summary.HEAD.unpack_from(good)[:-1], xxhash.xxh3_64_intdigest(body))
        with pytest.raises(SummaryError):
            unpack(summary.HEAD.pack(*head) + body)


def full_section(rng: np.random.Generator, blocks: int, keys: list[bytes] | tuple[()] = ()) -> Section:
    """Return the sample of an engine with ``blocks`` blocks, most of them random."""
    hashes = np.sort(rng.integers(0, 2**64, blocks, np.uint64))[: 2 * SAMPLE_MAX]
    hashes = np.unique(np.concatenate((hashes, summary._hashes(keys))))[:SAMPLE_MAX]
    return Section(int(hashes[-1]) >> 32, np.unique(hashes.astype(np.uint32)))
