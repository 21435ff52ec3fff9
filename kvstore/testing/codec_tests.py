"""The contract of a codec as a test suite, to be subclassed, with a measurement of peak memory."""

from __future__ import annotations

import random
import re
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from kvstore.codec.base import Codec, CodecContext
from kvstore.namespace import Namespace
from kvstore.testing.records import BufferKind, GuardedBuffer
from kvstore.testing.seeds import with_seed

_SIZES: Final = (0, 1, 2, 3, 4, 5, 7, 8, 31, 255, 256, 1000, 4095, 4096, 4097, 65_536, 131_072, 1_000_001, 8 << 20)
_KINDS: Final[tuple[BufferKind, ...]] = ("mmap", "bytearray", "numpy", "odd")
_BATCH: Final = 64
"""Payloads that are mutated and decoded together."""

_MIB: Final = 1 << 20

_SELF = Path("/proc/self")


class CodecTests:
    """Contract of every codec.

    Subclass it in a test module, under a name that pytest collects, and create your codec::

        class TestMyCodec(CodecTests):
            def make_codec(self) -> Codec:
                return MyCodec(MyOptions(level=3), self.context)

    Override ``bombs`` if its format declares sizes. Plain pytest runs it, without a plugin. A failure shows the seed
    that repeats it. A mutated payload may decode to other bytes: the checksum of its record detects that.

    Attributes:
        element_bytes: Length of the elements of the payloads.
        sizes: Lengths of the payloads of the round trips.
        mutations: Number of corrupted, truncated and extended payloads to decode.
        memory_rise_max: Most bytes by which the process may grow while a bomb or noise is decoded.
        rng: Seeded; fresh in each check.
    """

    element_bytes: ClassVar[int] = 2
    sizes: ClassVar[Sequence[int]] = _SIZES
    mutations: ClassVar[int] = 20_000
    memory_rise_max: ClassVar[int] = 16 * _MIB
    rng: random.Random

    def make_codec(self) -> Codec:
        """Return the codec, with the options to be tested."""
        raise NotImplementedError

    def bombs(self) -> Sequence[bytes]:
        """Return payloads that declare, or decode to, far more bytes than allowed."""
        return ()

    @property
    def context(self) -> CodecContext:
        """Namespace and element length of the payloads."""
        return CodecContext(Namespace({"suite": "codec"}), self.element_bytes)

    def make_reader(self) -> Codec:
        """Return the codec with the default options, as a tier with another configuration creates it for reading."""
        cls = type(self.make_codec())
        return cls(cls.options_type(), self.context)

    def payload(self, size_bytes: int) -> bytes:
        """Return a payload: numbers like those of a KV cache, noise, or zeros."""
        kind = self.rng.choice(("numbers", "numbers", "noise", "zeros"))
        if kind == "noise":
            return self.rng.randbytes(size_bytes)
        if kind == "zeros":
            return bytes(size_bytes)
        count = size_bytes // self.element_bytes + 1
        numbers = np.random.default_rng(self.rng.randrange(1 << 32)).normal(0, 0.7, count).astype(np.float32)
        # The two highest bytes of a float32 are a bfloat16; the highest one stands for one-byte types.
        octets = numbers.view(np.uint8).reshape(count, 4)[:, 4 - self.element_bytes :]
        return octets.tobytes()[:size_bytes]

    def encoded(self, codec: Codec, payloads: Sequence[bytes]) -> list[bytes]:
        """Encode payloads into targets of ``encoded_bytes_max()``, and check that they fit."""
        targets = [GuardedBuffer(codec.encoded_bytes_max(len(payload))) for payload in payloads]
        sizes = codec.encode([memoryview(payload) for payload in payloads], [target.view for target in targets])
        assert len(sizes) == len(payloads), f"{len(sizes)} sizes for {len(payloads)} payloads: return one of each"
        assert all(target.guards_intact for target in targets), (
            "encode wrote outside of a target: check its length first"
        )
        for payload, size in zip(payloads, sizes, strict=True):
            assert size is not None, (
                f"encode returned None for {len(payload)} bytes in encoded_bytes_max(): state the worst case"
            )
        return [bytes(target.view[:size]) for target, size in zip(targets, sizes, strict=True)]

    def decoded(
        self, codec: Codec, wire_id: int, sources: Sequence[bytes], lengths: Sequence[int]
    ) -> list[bytes | None]:
        """Decode payloads into targets of these lengths, in guarded memory."""
        targets = [GuardedBuffer(length) for length in lengths]
        sizes = codec.decode(wire_id, [memoryview(source) for source in sources], [target.view for target in targets])
        assert len(sizes) == len(sources), f"{len(sizes)} sizes for {len(sources)} payloads: return one of each"
        assert all(target.guards_intact for target in targets), (
            "decode wrote outside of a target: check its length first"
        )
        return [None if size is None else bytes(t.view[:size]) for t, size in zip(targets, sizes, strict=True)]

    @with_seed
    def test_round_trip_of_all_sizes(self) -> None:
        """Payloads of all ``sizes`` (0 bytes to 8 MiB) are decoded unchanged, also with default options."""
        codec = self.make_codec()
        for size in self.sizes:
            payload = self.payload(size)
            (stored,) = self.encoded(codec, [payload])
            for reader in (codec, self.make_reader()):
                (back,) = self.decoded(reader, codec.wire_id, [stored], [size])
                assert back == payload, f"a payload of {size} bytes came back different: decode must need no option"

    @with_seed
    def test_buffers_of_all_kinds(self) -> None:
        """Sources and targets may have any origin and alignment; sources stay unchanged."""
        codec = self.make_codec()
        for kind in _KINDS:
            for size in (1, 5, 4096, 10_001):
                payload = self.payload(size)
                source = GuardedBuffer(size, kind)
                source.view[:] = payload
                target = GuardedBuffer(codec.encoded_bytes_max(size), kind)
                (stored,) = codec.encode([source.view.toreadonly()], [target.view])
                assert stored is not None and target.guards_intact, (
                    f"{kind}, {size} bytes: encode returned None or wrote outside of its target"
                )
                back = GuardedBuffer(size, kind)
                (length,) = codec.decode(codec.wire_id, [target.view[:stored].toreadonly()], [back.view])
                assert (length, bytes(back.view)) == (size, payload), (
                    f"{kind}, {size} bytes came back different: assume neither alignment nor a writable source"
                )
                assert back.guards_intact and bytes(source.view) == payload, (
                    f"{kind}, {size} bytes: memory changed: write only into targets"
                )

    @with_seed
    def test_batches(self) -> None:
        """Batches of any lengths, including empty payloads, are decoded unchanged from any memory layout."""
        codec = self.make_codec()
        assert list(codec.encode([], [])) == [], "an empty batch: return an empty list from encode"
        assert list(codec.decode(codec.wire_id, [], [])) == [], "an empty batch: return an empty list from decode"
        for lengths in (
            [4096] * 9,
            [100, 100, 200, 200, 1, 0, 3],
            [0, 0],
            [self.rng.randrange(5000) for _ in range(40)],
        ):
            payloads = [self.payload(length) for length in lengths]
            stored = self.encoded(codec, payloads)
            assert self.decoded(codec, codec.wire_id, stored, lengths) == payloads, (
                f"a batch of {lengths} bytes came back different: treat each payload by itself"
            )
            # The same batch in one piece of memory, with evenly spaced sources and targets.
            row = max(map(codec.encoded_bytes_max, lengths)) + 1
            whole = memoryview(bytearray(2 * row * len(lengths)))
            sources = [whole[2 * i * row :][:length] for i, length in enumerate(lengths)]
            targets = [whole[(2 * i + 1) * row :][:row] for i in range(len(lengths))]
            for source, payload in zip(sources, payloads, strict=True):
                source[:] = payload
            again = codec.encode(sources, targets)
            read = [bytes(target[:size]) for target, size in zip(targets, again, strict=True)]
            assert [bytes(source) for source in sources] == payloads, (
                "encode changed a source that could be written: copy before you change bytes"
            )
            assert self.decoded(codec, codec.wire_id, read, lengths) == payloads, (
                f"a batch of {lengths} bytes in one piece of memory came back different: use only the given views"
            )

    @with_seed
    def test_short_targets(self) -> None:
        """A payload that does not fit its target is None in both directions, and affects neither memory nor batch."""
        codec = self.make_codec()
        for size in (1, 2, 100, 5000, 70_000):
            payloads = [self.payload(size), self.rng.randbytes(size), bytes(size)]
            stored = self.encoded(codec, payloads)
            rooms = [GuardedBuffer(self.rng.randrange(size), "odd") for _ in payloads]
            sizes = codec.encode([memoryview(payload) for payload in payloads], [room.view for room in rooms])
            assert len(sizes) == len(payloads), (
                f"{len(sizes)} sizes for {len(payloads)} payloads: return None for one that does not fit, and continue"
            )
            assert all(room.guards_intact for room in rooms), "encode wrote outside of a target: check its length first"
            for payload, room, length in zip(payloads, rooms, sizes, strict=True):
                if length is not None:
                    (back,) = self.decoded(codec, codec.wire_id, [bytes(room.view[:length])], [size])
                    assert back == payload, (
                        f"encode put {size} bytes into {length}, which decode to other bytes: return None"
                    )
            lengths = [size, self.rng.randrange(size), size]
            first, short, last = self.decoded(codec, codec.wire_id, stored, lengths)
            assert (first, last) == (payloads[0], payloads[2]), (
                "a payload that does not fit spoiled others: continue with the rest of the batch"
            )
            assert short is None, f"{size} bytes became {lengths[1]}: return None if the target is too short"

    @with_seed
    def test_threads_share_a_codec(self) -> None:
        """Threads that encode and decode at the same time don't disturb each other."""
        codec = self.make_codec()
        payloads = [self.payload(self.rng.randrange(1, 50_000)) for _ in range(32)]

        def round_trip(start: int) -> bool:
            mine = payloads[start:] + payloads[:start]
            back = self.decoded(codec, codec.wire_id, self.encoded(codec, mine), [len(payload) for payload in mine])
            return back == mine

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(round_trip, range(12))), (
                "a payload came back different: threads share the codec, so keep no scratch memory on it"
            )

    @with_seed
    def test_mutated_payloads(self) -> None:
        """Corrupted, truncated and extended payloads yield a valid length or None, and do not affect an intact one."""
        codec = self.make_codec()
        lengths = [self.rng.choice((1, 7, 64, 200, 777)) for _ in range(_BATCH)]
        payloads = [self.payload(length) for length in lengths]
        stored = self.encoded(codec, payloads)
        targets = [GuardedBuffer(length) for length in lengths]
        views = [target.view for target in targets]
        for done in range(0, self.mutations, _BATCH):
            sources = [memoryview(self.mutated(source)) for source in stored]
            good = done // _BATCH % _BATCH
            sources[good] = memoryview(stored[good])
            sizes = codec.decode(codec.wire_id, sources, views)
            for size, view in zip(sizes, views, strict=True):
                assert size is None or 0 <= size <= view.nbytes, (
                    f"decode returned {size} for a target of {view.nbytes} bytes: return None for a bad payload"
                )
            assert sizes[good] == lengths[good] and views[good] == payloads[good], (
                "bad payloads spoiled a good one: return None for each bad one, and continue"
            )
        assert all(target.guards_intact for target in targets), (
            "decode wrote outside of a target: check its length first"
        )

    @with_seed
    def test_noise(self) -> None:
        """Random bytes yield a length or None, without writes outside the targets and with bounded memory."""
        codec = self.make_codec()
        sources = [self.rng.randbytes(self.rng.randrange(2000)) for _ in range(_BATCH)]
        with memory_rise() as rise:
            for _ in range(20):
                self.decoded(codec, codec.wire_id, sources, [len(source) for source in sources])
        assert rise.bytes <= self.memory_rise_max, (
            f"memory rose by {rise.bytes} bytes for noise: check declared sizes before allocating"
        )

    @with_seed
    def test_bombs(self) -> None:
        """Payloads that declare or decode to far more bytes than requested are None, and cost no memory."""
        codec = self.make_codec()
        (zeros,) = self.encoded(codec, [bytes(64 * _MIB)])
        target = GuardedBuffer(32_768)
        for number, bomb in enumerate([zeros, *self.bombs()]):
            with memory_rise() as rise:
                sizes = codec.decode(codec.wire_id, [memoryview(bomb)] * 2, [target.view] * 2)
            assert list(sizes) == [None, None], (
                f"bomb {number}: {sizes}, expected None: stop at the length of the target"
            )
            assert rise.bytes <= self.memory_rise_max, (
                f"bomb {number}: memory rose by {rise.bytes} bytes: check declared sizes before allocating"
            )
            assert target.guards_intact, f"bomb {number}: bytes were written outside of the target"

    def mutated(self, source: bytes) -> bytes:
        """Return a payload with some bytes changed, replaced, cut off or appended."""
        changed = bytearray(source)
        kind = self.rng.randrange(4)
        place = self.rng.randrange(len(changed) + 1)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << self.rng.randrange(8)
        elif kind == 1:
            changed[place : place + self.rng.randrange(1, 5)] = self.rng.randbytes(self.rng.randrange(1, 5))
        elif kind == 2:
            del changed[place:]
        else:
            changed += self.rng.randbytes(self.rng.randrange(1, 20))
        return bytes(changed)


@dataclass(slots=True)
class MemoryRise:
    """Result of :func:`memory_rise`."""

    bytes: int = 0  # Rise of the process's memory to its peak; 0 until the end.


@contextmanager
def memory_rise() -> Iterator[MemoryRise]:
    """Measure the rise of this process's resident memory, at its peak, within the ``with`` block.

    Linux can reset the peak. On other systems only a rise above the former peak is visible.
    """
    found = MemoryRise()
    try:
        (_SELF / "clear_refs").write_text("5")
        before = _resident("VmRSS")
    except OSError:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield found
    try:
        after = _resident("VmHWM")
    except OSError:
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found.bytes = max(0, after - before)


def _resident(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(match[1]) * 1024
