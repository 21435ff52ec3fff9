"""The codecs of kvstore pass the suite of kvstore for codecs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

import pytest
import zstandard

from kvstore.codec.base import Codec
from kvstore.codec.byteplane import BytePlane, BytePlaneOptions
from kvstore.codec.zstd import Zstd, ZstdOptions
from kvstore.testing import CodecTests

MAGIC = b"\x28\xb5\x2f\xfd"
GIB = 1 << 30


class TestBytePlane2(CodecTests):
    mutations = 100_000

    def make_codec(self) -> Codec:
        return BytePlane(BytePlaneOptions(), self.context)


@pytest.mark.matrix
class TestBytePlane4(TestBytePlane2):
    element_bytes = 4


class TestZstd(CodecTests):
    level: ClassVar[int] = 1
    mutations = 500_000

    def make_codec(self) -> Codec:
        return Zstd(ZstdOptions(level=self.level), self.context)

    def bombs(self) -> Sequence[bytes]:
        """Frames with false headers: lengths, windows, dictionaries, and foreign kinds of frames."""
        zeros = bytes(32 << 10)
        frame = zstandard.ZstdCompressor(level=19).compress(bytes(GIB // 8))
        unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(GIB // 8))
        last_rle = (1 | 1 << 1 | 0x1FFFFF << 3).to_bytes(3, "little") + b"A"
        frames = [
            frame,
            unknown,
            frame + frame,
            # A descriptor (0xE0: eight bytes of length, 0x20: one segment, 0x03: dictionary), then its fields.
            MAGIC + b"\xe0" + struct.pack("<Q", GIB) + zeros,
            MAGIC + b"\xe0" + struct.pack("<Q", 2**63) + zeros,
            MAGIC + b"\xe0" + struct.pack("<Q", 2**64 - 1) + zeros,
            MAGIC + b"\xa0" + struct.pack("<I", 2**32 - 1) + last_rle,
            MAGIC + b"\xa0" + struct.pack("<I", 32769) + last_rle,
            MAGIC + b"\x00" + b"\xb0" + last_rle * 1000,
            MAGIC + b"\x00" + b"\xff" + zeros,
            MAGIC + b"\xa3" + struct.pack("<II", 7, 32768) + zeros,
            # Announces the right length in a window of 2 GiB and more, then contains too little.
            MAGIC + b"\x80" + b"\xa8" + struct.pack("<I", 32768) + b"\x01\x00\x00",
            b"\x50\x2a\x4d\x18" + struct.pack("<I", 2**32 - 1) + zeros,
        ]
        piece = zstandard.ZstdCompressor().compress(bytes(GIB // 64))
        tables = [
            frame,
            # More and longer pieces than there are; and pieces whose total is too long.
            struct.pack("<I", 2**32 - 1) + zeros,
            struct.pack("<3I", 2, 2**32 - 1, 1) + zeros,
            struct.pack("<9I", 8, *[len(piece)] * 8) + piece * 8,
        ]
        return [*(struct.pack("<2I", 1, len(frame)) + frame for frame in frames), *tables]


@pytest.mark.matrix
class TestZstdFast(TestZstd):
    level = -5
    mutations = 200_000


@pytest.mark.matrix
class TestZstdSlow(TestZstd):
    level = 19
    element_bytes = 1
    # At this level 8 MiB take fifteen seconds.
    sizes = CodecTests.sizes[:-2]
    mutations = 100_000
