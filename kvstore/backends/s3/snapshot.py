r"""What blocks a namespace has, in one object: a Bloom filter, so that a cold engine need not ask for a million.

The object has, in little-endian numbers::

    magic      8   89 6b 76 62 6c 6f 6d 0a   ("\x89kvblom\n")
    version    2   1
    hashes     2   bits that each block sets
    reserved   4   0
    bits       8   length of the filter
    blocks     8   blocks in it
    namespace 32   digest of their namespace
    checksum   8   xxh3-64 of the filter
    filter         bit n is bit n % 8, from the lowest, of byte n // 8

Bit i of a block is ((a + i * b) mod 2**64) mod bits, where a is the xxh3-64 of its object's name after the prefix, and
b is a rotated by 32 bits, with its lowest bit set.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.s3.uses import name_digest
from kvstore.codec.checksum import header_checksum
from kvstore.namespace import Namespace

__all__ = ["SNAPSHOT_BYTES_MAX", "BloomFilter"]

_BITS_PER_BLOCK: Final = 10
_HASHES: Final = 7
"""Together: of a hundred blocks that are not there, one has to be asked for all the same."""

_BITS_MIN: Final = 1 << 13
_START: Final = struct.Struct("<8sHHIQQ32sQ")
_MAGIC: Final = b"\x89kvblom\n"
_VERSION: Final = 1
_MASK: Final = (1 << 64) - 1

SNAPSHOT_BYTES_MAX: Final = 16 << 20
"""Longest snapshot, of some thirteen million blocks; a namespace with more is not told of."""


class BloomFilter:
    """A set of names that may say yes to some that are not in it, and never no to one that is.

    Args:
        bits: Its bytes.
        hashes: Bits that a name sets.
        blocks: Names in it.
    """

    def __init__(self, bits: npt.NDArray[np.uint8], hashes: int = _HASHES, blocks: int = 0) -> None:
        self._bits = bits
        self._hashes = hashes
        self.blocks = blocks

    @classmethod
    def of_digests(cls, digests: Iterable[int]) -> BloomFilter | None:
        """Make the filter of names by their digests; None if they are too many. Takes 0.2 s for a million."""
        starts = np.fromiter(digests, np.uint64)
        count = max(_BITS_MIN, -(-len(starts) * _BITS_PER_BLOCK // 8) * 8)
        if count // 8 + _START.size > SNAPSHOT_BYTES_MAX:
            return None
        # A byte for each bit at first: packed at the end, which is quicker than to set single bits.
        flags = np.zeros(count, np.bool_)
        steps = (starts << np.uint64(32) | starts >> np.uint64(32)) | np.uint64(1)
        for i in range(_HASHES):
            flags[(starts + np.uint64(i) * steps) % np.uint64(count)] = True
        return cls(np.packbits(flags, bitorder="little"), blocks=len(starts))

    def __contains__(self, name: str) -> bool:
        start = name_digest(name)
        step = (start << 32 & _MASK | start >> 32) | 1
        count = len(self._bits) * 8
        for i in range(self._hashes):
            bit = (start + i * step & _MASK) % count
            if not self._bits[bit >> 3] >> (bit & 7) & 1:
                return False
        return True

    def encode(self, namespace: Namespace) -> bytes:
        """Return the bytes of the object."""
        body = self._bits.tobytes()
        checksum = header_checksum(body)
        start = _START.pack(_MAGIC, _VERSION, self._hashes, 0, len(body) * 8, self.blocks, namespace.digest, checksum)
        return start + body

    @classmethod
    def decode(cls, data: bytes, namespace: Namespace) -> BloomFilter | None:
        """Return the filter in an object; None if it is not one of this version and namespace, or is damaged."""
        if len(data) < _START.size:
            return None
        magic, version, hashes, _, bits, blocks, digest, checksum = _START.unpack_from(data)
        body = memoryview(data)[_START.size :]
        if (magic, version, digest) != (_MAGIC, _VERSION, namespace.digest) or not 1 <= hashes <= 64:
            return None
        if not bits or bits != len(body) * 8 or checksum != header_checksum(body):
            return None
        return cls(np.frombuffer(body, np.uint8), hashes, blocks)
