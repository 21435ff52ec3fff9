"""zstd: Zstandard frames (RFC 8878), one a payload, by the package ``zstandard``.

A frame has to say how long its content is, so nothing is allocated for a longer one than was asked for. It carries no
checksum: the record's covers it. Frames that need a dictionary are refused; none was found to pay (docs/codecs.md).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec
import zstandard

from kvstore.codec.base import Codec, CodecContext
from kvstore.codec.rows import copy_rows
from kvstore.config import check_field

__all__ = ["Zstd", "ZstdOptions"]

_LEVEL_MIN: Final = -5
"""Levels below are hardly quicker and find hardly anything."""

_LEVEL_MAX: Final = 19
"""Levels above want hundreds of MiB for each thread."""

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""First bytes of a frame."""


class ZstdOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of :class:`Zstd`.

    Attributes:
        level: -5 to 19; higher is smaller and slower. What a level costs to decode is about the same for all.

    Raises:
        ConfigError: The level is out of range.
    """

    # The quickest level that makes use of what the planes bring out.
    level: int = 1

    def __post_init__(self) -> None:
        """Check the range."""
        check_field(_LEVEL_MIN <= self.level <= _LEVEL_MAX, "level", self.level, f"{_LEVEL_MIN} to {_LEVEL_MAX}")


class Zstd(Codec):
    """Compresses each payload to one frame.

    See :class:`~kvstore.codec.base.Codec` for what holds of every codec. A batch lets go of the GIL once, by the
    package's multi-buffer calls, where the package has them (it does on CPython).
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
        """Return the bound of the format's reference library (``ZSTD_COMPRESSBOUND``)."""
        return plain_bytes + (plain_bytes >> 8) + max(0, (131072 - plain_bytes) >> 11)

    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        """Compress each source; see :meth:`Codec.encode`."""
        compressor = self._compressor()
        sizes: list[int | None] = []
        # The package refuses an empty payload in a batch, and a batch of none.
        if self._many and all(source.nbytes for source in sources) and sources:
            frames: Any = compressor.multi_compress_to_buffer(list(sources), threads=1)
        else:
            frames = [compressor.compress(source) for source in sources]
        for i, target in enumerate(targets):
            frame = memoryview(frames[i])
            if frame.nbytes > target.nbytes:
                sizes.append(None)
                continue
            # Copied with the GIL held: it takes less than to get the GIL back.
            target[: frame.nbytes] = frame
            sizes.append(frame.nbytes)
        return sizes

    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        """Decompress each source; see :meth:`Codec.decode`."""
        declared = [_declared(source, target.nbytes) for source, target in zip(sources, targets, strict=True)]
        sizes: list[int | None] = [0 if size == 0 else None for size in declared]
        sound = [i for i, size in enumerate(declared) if size]
        if self._many and len(sound) > 1:
            try:
                contents = self._decompressor().multi_decompress_to_buffer([sources[i] for i in sound], threads=1)
            except zstandard.ZstdError:
                pass  # One of them is bad, and which one is found out below.
            else:
                whole = [(k, i) for k, i in enumerate(sound) if len(contents[k]) == declared[i]]
                copy_rows([contents[k] for k, _ in whole], [targets[i][: declared[i]] for _, i in whole])
                for _, i in whole:
                    sizes[i] = declared[i]
                return sizes
        for i in sound:
            sizes[i] = self._decode_one(sources[i], targets[i][: declared[i]])
        return sizes

    def _decode_one(self, source: memoryview, target: memoryview) -> int | None:
        """Decompress a frame that declares the length of ``target``."""
        try:
            with self._decompressor().stream_reader(source) as reader:
                filled = reader.readinto(target)
        except zstandard.ZstdError:
            return None
        return target.nbytes if filled == target.nbytes else None

    def _compressor(self) -> zstandard.ZstdCompressor:
        """Return this thread's own: the package's objects can't be shared."""
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


def _declared(source: memoryview, room_bytes: int) -> int | None:
    """Return how long a frame says that its content is; None if it is no frame of ours, or its content does not fit.

    The package's call for many frames breaks the process on frames that declare nothing, so they end here.
    """
    if bytes(source[:4]) != _MAGIC:
        return None  # A skippable frame too, of which the package would take another number for the length.
    try:
        frame = zstandard.get_frame_parameters(source)
    except zstandard.ZstdError:
        return None
    return frame.content_size if frame.content_size <= room_bytes and frame.dict_id == 0 else None
