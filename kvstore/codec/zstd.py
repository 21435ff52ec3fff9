"""zstd: several Zstandard frames (RFC 8878) per payload, through the package ``zstandard``.

The encoded payload is a count (u32, little-endian), as many lengths (u32), and as many frames. The concatenated
contents are the payload. It is cut at the ends of planes, so that the plane of the exponents has its own entropy code
instead of sharing one with the noise of the mantissas.

A frame must declare the length of its content, which bounds the memory for decoding. It has no checksum, because the
record has one. Frames that need a dictionary are refused; dictionaries saved too little (docs/codecs.md).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any, ClassVar, Final

import msgspec
import zstandard

from kvstore.codec.base import Codec, CodecContext
from kvstore.codec.rows import copy_rows
from kvstore.config import check_field

_LEVEL_MIN: Final = -5
"""Lower levels are hardly faster and hardly compress."""

_LEVEL_MAX: Final = 19
"""Higher levels need hundreds of MiB per thread."""

_PIECE_BYTES_MAX: Final = 65536
"""Longest piece: half of a Zstandard block, so that its working set stays in a processor's cache."""

_PIECE_BYTES_MIN: Final = 4096
"""Shortest piece, unless the payload is shorter: each piece adds about a hundred bytes."""

_HALVES_BELOW_BYTES: Final = 131072
"""Shorter payloads are only cut in the middle, between the planes of two-byte elements, because zstd is slow on pieces
of a few KiB. Longer payloads are cut at each quarter, for the planes of four-byte elements, and then evenly."""

_LENGTH_BYTES: Final = 4
_COUNT: Final = struct.Struct("<I")

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""First bytes of a frame."""


class ZstdOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of :class:`Zstd`."""

    # The fastest level that benefits from the planes.
    level: int = 1  # -5 to 19; higher levels compress better and slower. All levels decode at about the same rate.

    def __post_init__(self) -> None:
        check_field(_LEVEL_MIN <= self.level <= _LEVEL_MAX, "level", self.level, f"{_LEVEL_MIN} to {_LEVEL_MAX}")


class Zstd(Codec):
    """Compresses each payload, piece by piece.

    A batch releases the GIL once, through the package's multi-buffer calls, if it has them (on CPython).
    """

    name = "zstd"
    wire_ids: ClassVar[tuple[int, ...]] = (3,)
    options_type = ZstdOptions
    shorthand = "level"

    def __init__(self, options: ZstdOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        self._local = threading.local()
        self._many = {"multi_compress_to_buffer", "multi_decompress_to_buffer"} <= zstandard.backend_features

    def encoded_bytes_max(self, plain_bytes: int) -> int:
        """Return the bound of the format's reference library (``ZSTD_COMPRESSBOUND``), summed over all pieces."""
        bounds = (_bound(stop - start) for start, stop in pairwise(_cuts(plain_bytes)))
        return _LENGTH_BYTES + sum(_LENGTH_BYTES + bound for bound in bounds)

    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        cuts = [_cuts(source.nbytes) for source in sources]
        pieces: Any = [source[i:k] for source, at in zip(sources, cuts, strict=True) for i, k in pairwise(at)]
        compressor: Any = self._compressor()
        if self._many and pieces:  # The multi-buffer call refuses an empty list.
            left = iter(compressor.multi_compress_to_buffer(pieces, threads=1))
        else:
            left = map(compressor.compress, pieces)
        return [
            _write_frames(list(islice(left, len(at) - 1)), target) for at, target in zip(cuts, targets, strict=True)
        ]

    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        parts = [_read_frames(source, target) for source, target in zip(sources, targets, strict=True)]
        sizes: list[int | None] = [None if part is None else sum(room.nbytes for _, room in part) for part in parts]
        if self._many and self._decode_together([pair for part in parts if part for pair in part]):
            return sizes
        # A frame is invalid, or the package has no multi-buffer call.
        return [
            size if size is not None and all(self._decode_one(*pair) for pair in part or ()) else None
            for size, part in zip(sizes, parts, strict=True)
        ]

    def _decode_together(self, pairs: Sequence[tuple[memoryview, memoryview]]) -> bool:
        """Decompress frames into their targets; False if any of them fails."""
        if not pairs:
            return True
        try:
            # Passes the checked lengths, because another thread may change the memory before the package reads them.
            lengths = struct.pack(f"={len(pairs)}Q", *(room.nbytes for _, room in pairs))
            frames: Any = [frame for frame, _ in pairs]
            contents: Any = self._decompressor().multi_decompress_to_buffer(frames, lengths, threads=1)
        except zstandard.ZstdError:
            return False
        found = list(contents)
        if any(len(content) != room.nbytes for content, (_, room) in zip(found, pairs, strict=True)):
            return False
        copy_rows(found, [room for _, room in pairs])
        return True

    def _decode_one(self, frame: memoryview, room: memoryview) -> bool:
        """Decompress a frame that declares the length of ``room``."""
        try:
            with self._decompressor().stream_reader(frame) as reader:
                filled: int = reader.readinto(room)
        except zstandard.ZstdError:
            return False
        return filled == room.nbytes

    def _compressor(self) -> zstandard.ZstdCompressor:
        """Return this thread's compressor; threads cannot share one."""
        found: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if found is None:
            found = zstandard.ZstdCompressor(level=self.options.level, write_checksum=False, write_content_size=True)
            self._local.compressor = found
        return found

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        found: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if found is None:
            found = zstandard.ZstdDecompressor()
            self._local.decompressor = found
        return found


def _cuts(size_bytes: int) -> list[int]:
    """Return the cut positions of a payload, including its start and end."""
    if size_bytes < 2 * _PIECE_BYTES_MIN:
        return [0, size_bytes] if size_bytes else [0]
    count = 2 if size_bytes < _HALVES_BELOW_BYTES else 4 * -(-size_bytes // (4 * _PIECE_BYTES_MAX))
    return [i * size_bytes // count for i in range(count + 1)]


def _bound(size_bytes: int) -> int:
    return size_bytes + (size_bytes >> 8) + max(0, (131072 - size_bytes) >> 11)


def _write_frames(frames: Sequence[Any], target: memoryview) -> int | None:
    """Write an encoded payload; return its length, or None if it does not fit."""
    views = [memoryview(frame) for frame in frames]
    head = struct.pack(f"<{1 + len(views)}I", len(views), *(view.nbytes for view in views))
    size = len(head) + sum(view.nbytes for view in views)
    if size > target.nbytes:
        return None
    at = len(head)
    target[:at] = head
    for view in views:
        # Copied with the GIL held, which takes less time than reacquiring the GIL.
        target[at : at + view.nbytes] = view
        at += view.nbytes
    return size


def _read_frames(source: memoryview, target: memoryview) -> list[tuple[memoryview, memoryview]] | None:
    """Return each frame and the target of its content; None if the source is invalid or does not fit."""
    if source.nbytes < _LENGTH_BYTES:
        return None
    (count,) = _COUNT.unpack_from(source)
    at = (1 + count) * _LENGTH_BYTES
    if at > source.nbytes or count > max(1, target.nbytes // _PIECE_BYTES_MIN):
        return None
    found: list[tuple[memoryview, memoryview]] = []
    end = 0
    for length in struct.unpack_from(f"<{count}I", source, _LENGTH_BYTES):
        frame = source[at : at + length]
        size = _declared(frame)
        if not 0 < size <= target.nbytes - end:
            return None
        found.append((frame, target[end : end + size]))
        at += length
        end += size
    return found if at == source.nbytes else None


def _declared(frame: memoryview) -> int:
    """Return the declared content length of a frame; 0 without one, or for an unsupported frame.

    The package's multi-buffer call crashes the process on frames without a declared length, so they are rejected here.
    """
    if bytes(frame[:4]) != _MAGIC:
        return 0  # Includes skippable frames, for which the package would misread another number as the length.
    try:
        found = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError:
        return 0
    declared: int = found.content_size
    return 0 if found.dict_id or declared in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) else declared
