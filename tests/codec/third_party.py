"""Codecs that don't ship with kvstore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvstore.codec.base import Codec


class Inverted(Codec):
    """Turns every bit around: as good as none, and easy to tell from none."""

    name = "inverted"
    wire_ids: ClassVar[tuple[int, ...]] = (200,)

    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        return [self._invert(source, target) for source, target in zip(sources, targets, strict=True)]

    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        return self.encode(sources, targets)

    def _invert(self, source: memoryview, target: memoryview) -> int | None:
        if source.nbytes > target.nbytes:
            return None
        target[: source.nbytes] = bytes(byte ^ 0xFF for byte in source)
        return source.nbytes


class Mirrored(Inverted):
    """Turns payloads around; somebody else's, who took the same id."""

    name = "mirrored"

    def _invert(self, source: memoryview, target: memoryview) -> int | None:
        if source.nbytes > target.nbytes:
            return None
        target[: source.nbytes] = bytes(source)[::-1]
        return source.nbytes


class Trespasser(Inverted):
    """Takes an id that is not for others."""

    wire_ids = (3,)


class Unnumbered(Codec):
    """Forgot to take an id."""

    name = "unnumbered"
    encode = Inverted.encode
    decode = Inverted.decode
