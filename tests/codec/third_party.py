"""Third-party codecs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvstore.codec.base import Codec


class Inverted(Codec):
    """Inverts every bit: no compression, but easy to distinguish from raw."""

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
    """Reverses payloads; another author's codec with the same id."""

    name = "mirrored"

    def _invert(self, source: memoryview, target: memoryview) -> int | None:
        if source.nbytes > target.nbytes:
            return None
        target[: source.nbytes] = bytes(source)[::-1]
        return source.nbytes


class Trespasser(Inverted):
    """Uses a reserved id."""

    wire_ids = (3,)


class Unnumbered(Codec):
    """Has no id."""

    name = "unnumbered"
    encode = Inverted.encode
    decode = Inverted.decode


class Touchy(Codec):
    """Halves blocks of equal bytes, and fails on one particular byte."""

    HATED: ClassVar[int] = 0xEE
    name = "touchy"
    wire_ids: ClassVar[tuple[int, ...]] = (201,)
    defect: ClassVar[str] = ""
    encoded_bytes: ClassVar[int] = 0  # Reported length of encoded blocks; 0 for their half.

    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        sizes: list[int | None] = []
        for source, target in zip(sources, targets, strict=True):
            sizes.append(self.encoded_bytes or source.nbytes // 2)
            target[: source.nbytes // 2] = source[: source.nbytes // 2]
        return self._with_defect(sources, sizes)

    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        for source, target in zip(sources, targets, strict=True):
            target[:] = bytes(source[-1:]) * target.nbytes
        return self._with_defect(sources, [target.nbytes for target in targets])

    def _with_defect(self, sources: Sequence[memoryview], sizes: Sequence[int | None]) -> Sequence[int | None]:
        if self.defect == "fails":
            return [None] * len(sizes)
        if all(source[0] != self.HATED for source in sources):
            return sizes
        match self.defect:
            case "raises":
                raise KeyError(sources)
            case "memory":
                raise MemoryError
            case "counts":
                return sizes[1:]
            case "sizes":
                return [1 << 40] * len(sizes)
        return sizes
