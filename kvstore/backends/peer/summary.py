"""Summaries of an engine's blocks, and an index of the summaries of other engines. No I/O.

A summary is a sample: the ``SAMPLE_MAX`` blocks with the smallest key hashes. All engines use the same hash, so engines
with the same prefix sample the same blocks of it.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.types import BlockKey

SAMPLE_MAX: Final = 4096
"""Most blocks of a sample. Of 100,000 blocks, one in 24 is sampled: ten blocks of a prefix of 250 blocks."""

ENGINES_MAX: Final = 1024
"""Most engines with known summaries; at 33 KiB each, these take 33 MiB, and their index 64 MiB."""

MAGIC: Final = b"\x89kvsumm\n"
VERSION: Final = 1

_SECTIONS_MAX: Final = 2
"""One section for memory and one for storage, so that a large disk does not thin out the sample of the memory."""

HEAD: Final = struct.Struct("<8sHHIQ")
SECTION: Final = struct.Struct("<II")

SUMMARY_BYTES_MAX: Final = HEAD.size + _SECTIONS_MAX * (SECTION.size + 4 * SAMPLE_MAX)

_MATCHES_MAX: Final = 1 << 14
"""Most pairs of key and engine that one search considers, from the first key on: half a millisecond."""

_ALIKE: Final = 0.1
"""Engines whose shares of a prefix differ by less count as equal; one of them is chosen at random."""

_COVERED: Final = 1e-6
"""Weight factor of a block that an engine chosen before also has."""

_Hashes = npt.NDArray[np.uint64]


class SummaryError(ValueError):
    """Bytes that are not a valid summary."""


class Section(NamedTuple):
    """A sample in its published form."""

    threshold: int  # A block of the engine is in the sample if the upper half of its hash is at most this.
    digests: npt.NDArray[np.uint32]  # Lower halves of the hashes, ascending, each once.


class Sample:
    """Collects keys, and keeps the smallest hashes."""

    def __init__(self) -> None:
        self._kept: _Hashes = np.empty(0, np.uint64)
        self._full = False

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Add keys; a thousand take some hundred microseconds."""
        hashes = _hashes(keys)
        if self._full:
            hashes = hashes[hashes < self._kept[-1]]
        kept = np.unique(np.concatenate((self._kept, hashes)))
        self._full = self._full or len(kept) > SAMPLE_MAX
        self._kept = kept[:SAMPLE_MAX]

    def section(self) -> Section:
        threshold = int(self._kept[-1] >> np.uint64(32)) if self._full else 0xFFFFFFFF
        return Section(threshold, np.unique(self._kept.astype(np.uint32)))


def pack(sections: Sequence[Section]) -> bytes:
    """Return a summary as bytes."""
    body = b"".join([SECTION.pack(one.threshold, len(one.digests)) + one.digests.tobytes() for one in sections])
    return HEAD.pack(MAGIC, VERSION, len(sections), 0, xxhash.xxh3_64_intdigest(body)) + body


def unpack(data: bytes) -> list[Section]:
    """Read a summary. ``SummaryError``: the data is not a summary, is damaged, or is of another version."""
    if not HEAD.size <= len(data) <= SUMMARY_BYTES_MAX:
        raise SummaryError(f"{len(data)} bytes are no summary")
    magic, version, count, _, checksum = HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or count > _SECTIONS_MAX:
        raise SummaryError("no summary, or one of another version")
    if checksum != xxhash.xxh3_64_intdigest(data[HEAD.size :]):
        raise SummaryError("the checksum is wrong")
    sections, at = [], HEAD.size
    for _ in range(count):
        if at + SECTION.size > len(data):
            raise SummaryError("a section is cut off")
        threshold, length = SECTION.unpack_from(data, at)
        at += SECTION.size
        if length > SAMPLE_MAX or at + 4 * length > len(data):
            raise SummaryError(f"a section of {length} digests is too long")
        digests = np.frombuffer(data, "<u4", length, at).astype(np.uint32)
        if length > 1 and not bool((digests[1:] > digests[:-1]).all()):
            raise SummaryError("digests are not in order")
        sections.append(Section(threshold, digests))
        at += 4 * length
    if at != len(data):
        raise SummaryError(f"{len(data) - at} bytes follow the sections")
    return sections


@dataclass(frozen=True, slots=True)
class Index:
    """Engines by sampled block."""

    engines: int  # Number of engines; they are identified by their positions.
    _entries: _Hashes
    """Digest, shifted left by 16 bits, and section of each sampled block, ascending."""
    _engine_of: npt.NDArray[np.int64]
    _thresholds: _Hashes
    _weights: npt.NDArray[np.float64]
    """Number of blocks that one sampled block represents, by section."""

    @classmethod
    def of(cls, summaries: Sequence[Sequence[Section]]) -> Index:
        """Return the index of at most 32,768 summaries; takes 0.1 s for a thousand."""
        sections = [section for summary in summaries for section in summary]
        engines = np.repeat(np.arange(len(summaries)), [len(summary) for summary in summaries])
        thresholds = np.array([one.threshold for one in sections], np.uint64)
        # Filled in place: a second copy would take as much memory as the index.
        found, end = np.empty(sum(len(one.digests) for one in sections), np.uint64), 0
        for place, one in enumerate(sections):
            start, end = end, end + len(one.digests)
            found[start:end] = one.digests
            found[start:end] <<= np.uint64(16)
            found[start:end] |= np.uint64(place)
        found.sort()
        return cls(len(summaries), found, engines, thresholds, 2.0**32 / (thresholds.astype(np.float64) + 1))

    def best(self, keys: Sequence[BlockKey], most: int, barred: Collection[int] = ()) -> list[int]:
        """Return the engines that seem to have most of some blocks, the best first.

        A second engine is chosen for the blocks that the first one seems to lack; if it lacks none, as a reserve.

        Args:
            most: Most engines to return.
            barred: Engines not to return.
        """
        hashes = _hashes(keys)
        low = (hashes & np.uint64(0xFFFFFFFF)) << np.uint64(16)
        # In ascending order, because neighbouring searches share the processor's caches.
        order = low.argsort()
        first, counts = np.empty(len(low), np.int64), np.empty(len(low), np.int64)
        first[order] = np.searchsorted(self._entries, low[order])
        counts[order] = np.searchsorted(self._entries, low[order] + np.uint64(1 << 16))
        counts -= first
        ends = counts.cumsum()
        if not len(ends) or not ends[-1]:
            return []
        cut = max(1, int(np.searchsorted(ends, _MATCHES_MAX)))
        first, counts, ends = first[:cut], counts[:cut], ends[:cut]
        key = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
        section = (self._entries[places] & np.uint64(0xFFFF)).astype(np.int64)
        # Up to its threshold a section has all blocks; a digest that matches above it is of another block.
        sampled = (hashes >> np.uint64(32))[key] <= self._thresholds[section]
        key, section = key[sampled], section[sampled]
        engine, weight = self._engine_of[section], self._weights[section]
        chosen: list[int] = []
        banned = list(barred)
        while len(chosen) < most:
            shares = np.bincount(engine, weight, self.engines)
            shares[banned] = 0
            best = int((shares * np.random.uniform(1 - _ALIKE, 1, self.engines)).argmax())
            if not shares[best]:
                break
            chosen.append(best)
            banned.append(best)
            covered = np.isin(key, key[engine == best])
            weight = np.where(covered, self._weights[section] * _COVERED, weight)
        return chosen


def _hashes(keys: Sequence[BlockKey]) -> _Hashes:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))
