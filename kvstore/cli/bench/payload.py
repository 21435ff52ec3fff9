"""The bytes of measured blocks, with stamps that identify each block.

All blocks of a run have the same bytes, except for a stamp of eight bytes in each page of 4096. The stamp combines the
block's number, the page and the seed, so blocks are cheap to make and no two pages are equal. A comparison detects a
changed byte, a page of another block, and a page that was never written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.primary import PAGE_BYTES, Region

Words: TypeAlias = npt.NDArray[np.uint64]

_WORDS_PER_PAGE: Final = PAGE_BYTES // 8
_GOLDEN: Final = 0x9E3779B97F4A7C15
_PAGE_STEP: Final = 0xC2B2AE3D27D4EB4F
_MASK: Final = (1 << 64) - 1
_FILE_BYTES_MAX: Final = 1 << 28
"""Bytes read from a file: longer than any block, and enough to be representative for compression."""


class Payload:
    """Makes and checks blocks of one length, a multiple of 4096 bytes.

    Args:
        kind: ``"random"`` (independent bytes), ``"bf16"`` (bfloat16 numbers as in KV caches, slightly compressible) or
            ``"file:PATH"`` (bytes of a file, repeated as needed).

    Raises:
        ConfigError: The kind is unknown, the file can't be read, or the length is not a multiple of 4096.
    """

    def __init__(self, kind: str, block_bytes: int, seed: int) -> None:
        if block_bytes < PAGE_BYTES or block_bytes % PAGE_BYTES:
            raise ConfigError(
                f"A block of {block_bytes} bytes can't be measured. Expected a multiple of {PAGE_BYTES}, such as "
                "128KiB."
            )
        self.kind = kind
        self.block_bytes = block_bytes
        self.seed = seed
        tile = np.frombuffer(_tile(kind, block_bytes, seed), np.uint8)
        self._tile: Words = tile.view(np.uint64).reshape(-1, _WORDS_PER_PAGE).copy()
        self._pages = (np.arange(len(self._tile), dtype=np.uint64) * np.uint64(_PAGE_STEP)).astype(np.uint64)

    @property
    def identity(self) -> str:
        """Text that distinguishes these bytes from others of the same length, for a namespace."""
        digest = hashlib.sha256(self._tile[:, 1:].tobytes()).hexdigest()[:16]
        return f"{self.kind.partition(':')[0]}-{self.seed}-{digest}"

    def key(self, number: int) -> bytes:
        """Return the key of a block, with the format of engines: a hash of 32 bytes and the group's number in 4."""
        return hashlib.sha256(b"%d %d" % (self.seed, number)).digest() + b"\0\0\0\0"

    def prepare(self, region: Region) -> BlockRows:
        """Fill all slots of a region and return it as rows that can be stamped and checked."""
        rows = BlockRows(self, region)
        rows.array[:] = self._tile
        return rows

    def stamps(self, number: int) -> Words:
        """Return the stamp of each page of a block."""
        first = np.uint64((number * _GOLDEN + self.seed + 1) & _MASK)
        return self._pages ^ first

    @property
    def tile(self) -> Words:
        """The bytes shared by all blocks, of shape (pages, words); the stamp replaces the first word of each page."""
        return self._tile


class BlockRows:
    """The slots of a region as blocks of a payload; made by :meth:`Payload.prepare`."""

    def __init__(self, payload: Payload, region: Region) -> None:
        self.payload = payload
        # Shape (slots, pages, words).
        self.array: Words = region.rows().view(np.uint64).reshape(region.slots, -1, _WORDS_PER_PAGE)

    def release(self) -> None:
        """Release the region, so that it can be closed."""
        self.array = np.empty((0, 0, 0), np.uint64)

    def write(self, slots: Sequence[int], numbers: Sequence[int]) -> None:
        """Write these blocks to slots that already hold blocks of this payload."""
        for slot, number in zip(slots, numbers, strict=True):
            self.array[slot, :, 0] = self.payload.stamps(number)

    def spoil(self, slot: int, number: int) -> None:
        """Change every page of a slot before a load, to detect pages that the load does not write."""
        self.array[slot, :, 0] = ~self.payload.stamps(number)

    def is_right(self, slot: int, number: int) -> bool:
        """Whether every byte of a slot is that of this block; if not, the shared bytes of the slot are restored."""
        row, tile = self.array[slot], self.payload.tile
        right = np.array_equal(row[:, 0], self.payload.stamps(number)) and np.array_equal(row[:, 1:], tile[:, 1:])
        if not right:
            row[:] = tile
        return bool(right)


def _tile(kind: str, size: int, seed: int) -> bytes | bytearray:
    random = np.random.default_rng(seed)
    name, _, path = kind.partition(":")
    if name == "random" and not path:
        return random.bytes(size)
    if name == "bf16" and not path:
        numbers = random.standard_normal(size // 2, dtype=np.float32)
        return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
    if name != "file" or not path:
        raise ConfigError(f"--payload is {kind!r}. Expected 'random', 'bf16' or 'file:PATH'.")
    return _of_file(Path(path), size)


def _of_file(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(min(size, _FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"--payload file {str(path)!r} can't be read: {error.strerror}.") from error
    if not data:
        raise ConfigError(f"--payload file {str(path)!r} is empty. Give one that has at least a byte.")
    whole: Any = np.resize(np.frombuffer(data, np.uint8), size)
    return bytes(whole.tobytes())
