"""The codec suite finds defects: each broken codec fails the intended check."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from kvstore.codec.base import Codec
from kvstore.testing import CodecTests
from tests.contract.failures import failure_of


class Deflate(Codec):
    """A correct codec of the standard library; the broken ones derive from it."""

    name = "deflate"
    wire_ids: ClassVar[tuple[int, ...]] = (201,)

    def encoded_bytes_max(self, plain_bytes: int) -> int:
        return plain_bytes + plain_bytes // 100 + 64

    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        return [self.put(self.deflate(s), t) for s, t in zip(sources, targets, strict=True)]

    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        return [self.decode_one(s, t) for s, t in zip(sources, targets, strict=True)]

    def deflate(self, source: memoryview) -> bytes:
        return zlib.compress(source, 1)

    def decode_one(self, source: memoryview, target: memoryview) -> int | None:
        try:
            engine = zlib.decompressobj()
            plain = engine.decompress(source, target.nbytes + 1)
        except zlib.error:
            return None
        return self.put(plain, target) if engine.eof else None

    def put(self, data: bytes, target: memoryview) -> int | None:
        if len(data) > target.nbytes:
            return None
        target[: len(data)] = data
        return len(data)


class Believes(Deflate):
    """Inflates a payload completely before it checks the target's length."""

    def decode_one(self, source: memoryview, target: memoryview) -> int | None:
        try:
            return self.put(zlib.decompress(source), target)
        except zlib.error:
            return None


class Raises(Deflate):
    """Raises for a bad payload."""

    def decode_one(self, source: memoryview, target: memoryview) -> int | None:
        return self.put(zlib.decompress(source), target)


class Cuts(Deflate):
    """Writes the part that fits of a block that does not."""

    def put(self, data: bytes, target: memoryview) -> int | None:
        return super().put(data[: target.nbytes], target)


class Overwrites(Deflate):
    """Uses the source as scratch memory."""

    def deflate(self, source: memoryview) -> bytes:
        made = super().deflate(source)
        if not source.readonly:
            source[:1] = b"\0"
        return made

    def decode(self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Any:
        found = super().decode(wire_id, sources, targets)
        for target, size in zip(targets, found, strict=True):
            if size:
                # The guard before the target, as a C extension with a wrong index overwrites it.
                whole = memoryview(target.obj).cast("B")
                whole[0] = 0
        return found


class Stops(Deflate):
    """Ends a batch at the first payload that does not fit."""

    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        sizes = list(super().encode(sources, targets))
        return sizes[: sizes.index(None)] if None in sizes else sizes


class Forgets(Deflate):
    """Omits the last byte of a payload of odd length."""

    def deflate(self, source: memoryview) -> bytes:
        return super().deflate(source[: source.nbytes - source.nbytes % 2])


class Shares(Deflate):
    """Keeps the payload of one call in state shared with others."""

    kept: bytes = b""

    def deflate(self, source: memoryview) -> bytes:
        self.kept = bytes(source)
        # Lets another thread run, as a call into C does.
        zlib.compress(bytes(100_000))
        return zlib.compress(self.kept, 1)


class Spreads(Deflate):
    """One bad payload makes its whole batch bad."""

    def decode(self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Any:
        found = super().decode(wire_id, sources, targets)
        return [None] * len(found) if None in found else found


class Fixed(Deflate):
    """Reads only payloads of its own options."""

    made: ClassVar[int] = 0

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        type(self).made += 1
        self.mark = self.made.to_bytes(4, "little")

    def deflate(self, source: memoryview) -> bytes:
        return self.mark + super().deflate(source)

    def decode_one(self, source: memoryview, target: memoryview) -> int | None:
        return super().decode_one(source[4:], target) if source[:4] == self.mark else None


def suite_of(cls: type[Codec]) -> CodecTests:
    """Return the suite for a codec, small enough to run ten times."""

    class Suite(CodecTests):
        mutations = 2000
        sizes = (0, 1, 2, 5, 4096, 65_537)

        def make_codec(self) -> Codec:
            return cls(cls.options_type(), self.context)

    return Suite()


CHECKS = [name for name in dir(CodecTests) if name.startswith("test_")]


@pytest.mark.parametrize("check", CHECKS)
def test_a_sound_codec_passes(check: str) -> None:
    """The base of the broken codecs passes each check."""
    getattr(suite_of(Deflate), check)()


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Believes, "test_bombs"),
        (Raises, "test_mutated_payloads"),
        (Raises, "test_noise"),
        (Cuts, "test_short_targets"),
        (Overwrites, "test_buffers_of_all_kinds"),
        (Overwrites, "test_round_trip_of_all_sizes"),
        (Overwrites, "test_batches"),
        (Stops, "test_short_targets"),
        (Forgets, "test_round_trip_of_all_sizes"),
        (Forgets, "test_batches"),
        (Shares, "test_threads_share_a_codec"),
        (Spreads, "test_mutated_payloads"),
        (Spreads, "test_short_targets"),
        (Fixed, "test_round_trip_of_all_sizes"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_codec_fails(broken: type[Codec], check: str) -> None:
    """The defect is found, and the failure names the seed."""
    error = failure_of(lambda: getattr(suite_of(broken), check)(), (AssertionError, zlib.error))
    assert any("KVSTORE_TEST_SEED=" in note for note in error.__notes__)
