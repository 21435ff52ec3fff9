"""Records for tests: real headers, random payloads, and memory that detects stray writes."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.backends.base import RecordGeometry, RecordRead, RecordWrite
from kvstore.codec.record import RecordCodec
from kvstore.errors import RecordError
from kvstore.namespace import Namespace
from kvstore.types import BlockKey

CANARY = 0xC7
"""Fill byte of untouched memory."""

_GUARD_BYTES = 4096
_PAGE = 4096

BufferKind = str
"""``"mmap"`` (page-aligned), ``"bytearray"``, ``"numpy"`` (aligned) or ``"odd"`` (one byte off every alignment)."""


class GuardedBuffer:
    """Memory of a given length with guards before and behind it, all filled with the canary.

    Attributes:
        view: The memory between the guards.
    """

    def __init__(self, size_bytes: int, kind: BufferKind = "mmap") -> None:
        total = _GUARD_BYTES + -(-size_bytes // _PAGE) * _PAGE + _GUARD_BYTES
        self._all = memoryview(_ALLOCATE[kind](total)).cast("B")
        start = _GUARD_BYTES + (1 if kind == "odd" else 0)
        self._before, self.view, self._behind = (
            self._all[:start],
            self._all[start : start + size_bytes],
            self._all[start + size_bytes :],
        )
        self.fill()

    def fill(self) -> None:
        """Fill everything with the canary."""
        self._all[:] = bytes([CANARY]) * self._all.nbytes

    @property
    def guards_intact(self) -> bool:
        """Whether the surroundings of the memory are unchanged."""
        return _is_canary(self._before) and _is_canary(self._behind)

    @property
    def untouched(self) -> bool:
        """Whether the memory and its surroundings are unchanged."""
        return _is_canary(self._all)


@dataclass(slots=True, eq=False)
class Target:
    """Target of reading one record: a guarded header and a guarded payload buffer."""

    key: BlockKey
    header: GuardedBuffer
    payload: GuardedBuffer
    read: RecordRead

    def fill(self) -> None:
        """Fill both with the canary."""
        self.header.fill()
        self.payload.fill()

    @property
    def untouched(self) -> bool:
        """Whether both buffers are unchanged."""
        return self.header.untouched and self.payload.untouched

    @property
    def guards_intact(self) -> bool:
        """Whether the surroundings of both buffers are unchanged."""
        return self.header.guards_intact and self.payload.guards_intact


class RecordMaker:
    """Makes random keys and payloads, and their records."""

    def __init__(self, namespace: Namespace, geometry: RecordGeometry, rng: random.Random) -> None:
        self.geometry = geometry
        self.rng = rng
        self._codec = RecordCodec(namespace, header_bytes=geometry.header_bytes)

    def payload(self, size_bytes: int | None = None) -> bytes:
        """Return random bytes, by default a whole slot."""
        return self.rng.randbytes(self.geometry.payload_bytes_max if size_bytes is None else size_bytes)

    def key(self, length: int = 32) -> BlockKey:
        """Return a random key."""
        return self.rng.randbytes(length)

    def write(self, key: BlockKey, payload: bytes, kind: BufferKind = "mmap", parts: int = 1) -> RecordWrite:
        """Return a write of a payload under a key, in buffers of this kind; the payload is split into ``parts``."""
        header = GuardedBuffer(self.geometry.header_bytes, kind)
        body = GuardedBuffer(len(payload), kind)
        body.view[:] = payload
        self._codec.encode_header(header.view, key, body.view)
        return RecordWrite(key, [header.view, *_cut(body.view, parts)])

    def target(
        self, key: BlockKey, payload_bytes: int | None = None, kind: BufferKind = "mmap", parts: int = 1
    ) -> Target:
        """Return a read of a key's record, by default with room for a whole slot."""
        header = GuardedBuffer(self.geometry.header_bytes, kind)
        size = self.geometry.payload_bytes_max if payload_bytes is None else payload_bytes
        payload = GuardedBuffer(size, kind)
        return Target(key, header, payload, RecordRead(key, [header.view, *_cut(payload.view, parts)]))

    def content(self, target: Target) -> bytes:
        """Return the payload that was read, verified as in a tier.

        Raises:
            AssertionError: The record is incomplete, damaged or of another key, or the memory around it was written.
        """
        assert target.guards_intact, f"key {target.key.hex()}: bytes were written outside of the buffers"
        try:
            size = self._codec.verify(target.key, target.header.view, target.payload.view, target.read.filled_bytes)
        except RecordError as error:
            raise AssertionError(f"key {target.key.hex()}: OK, but {error}") from error
        return bytes(target.payload.view[:size])


def _bytearray(size: int) -> bytearray:
    return bytearray(size)


def _mmap(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size)


def _numpy(size: int) -> memoryview:
    return np.zeros(size, dtype=np.uint8).data


_ALLOCATE: dict[BufferKind, Callable[[int], bytearray | mmap.mmap | memoryview]] = {
    "mmap": _mmap,
    "bytearray": _bytearray,
    "numpy": _numpy,
    "odd": _bytearray,
}


def _cut(view: memoryview, parts: int) -> Sequence[memoryview]:
    """Cut a buffer into parts of different lengths."""
    if parts == 1 or view.nbytes < 2:
        return [view]
    first = max(1, view.nbytes // 3)
    return [view[:first], *_cut(view[first:], parts - 1)]


def _is_canary(view: memoryview) -> bool:
    return bytes(view).count(CANARY) == view.nbytes
