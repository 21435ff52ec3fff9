"""Guarded calls of codecs: a third-party codec with a defect costs only its own blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.codec.base import Codec

__all__ = ["decode_guarded", "encode_guarded"]

logger = logging.getLogger("kvstore.codec")

_WARNED_MAX: Final = 64
"""Defects that are logged, once each per process; foreign records can't fill the log."""

_warned: set[tuple[str, str, str]] = set()


def encode_guarded(codec: Codec, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
    """Return the sizes of ``codec.encode``; None for every payload after a defect: they are stored raw."""
    sizes = _sizes_of(codec, "encode", lambda: codec.encode(sources, targets), targets)
    return [None] * len(sources) if sizes is None else sizes


def decode_guarded(
    codec: Codec, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
) -> tuple[Sequence[int | None], bool]:
    """Return the sizes of ``codec.decode``, and whether it had no defect.

    A codec that fails on a batch gets its payloads one by one, so that one payload fails no other.
    """
    sizes = _sizes_of(codec, "decode", lambda: codec.decode(wire_id, sources, targets), targets)
    if sizes is not None:
        return sizes, True
    if len(sources) == 1:
        return [None], False
    alone = [decode_guarded(codec, wire_id, [one], [room])[0] for one, room in zip(sources, targets, strict=True)]
    return [size for (size,) in alone], False


def _sizes_of(
    codec: Codec, method: str, work: Callable[[], Sequence[int | None]], targets: Sequence[memoryview]
) -> Sequence[int | None] | None:
    """Return the sizes from a call; None if it raises or returns impossible sizes."""
    try:
        sizes = list(work())
        if len(sizes) == len(targets) and all(
            size is None or 0 <= size <= room.nbytes for size, room in zip(sizes, targets, strict=True)
        ):
            return sizes
        defect = "gave sizes that its targets don't have"
    # Any exception: the blocks count as not encoded or decoded, and a traceback would keep views of slots.
    except Exception as error:
        defect = f"raised {type(error).__name__}"
    _warn(codec, method, defect)
    return None


def _warn(codec: Codec, method: str, defect: str) -> None:
    path = f"{type(codec).__module__}:{type(codec).__qualname__}"
    if (path, method, defect) not in _warned and len(_warned) < _WARNED_MAX:
        _warned.add((path, method, defect))
        what = "stored as they are" if method == "encode" else "misses"
        logger.warning("Codec '%s' %s in %s(), which is a defect of it. Its blocks are %s.", path, defect, method, what)
