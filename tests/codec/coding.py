"""Encoded records in memory: written as a tier writes them, read as a tier with any other codecs reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.codec.chain import ChainConfig
from kvstore.codec.coding import Encoder
from kvstore.codec.record import RecordCodec, RecordFault, RecordHeader
from kvstore.errors import RecordError
from kvstore.namespace import Namespace
from kvstore.tiers.codecs import TierCodecs
from tests.codec.records import WRITER_ID, fixed_clock

NAMESPACE = Namespace({"model": "tiny", "dtype": "bfloat16"})


def numbers(size_bytes: int, seed: int = 0, element_bytes: int = 2) -> bytes:
    """Return bytes of normally distributed numbers, which compress like those of a KV cache."""
    values = np.random.default_rng(seed).normal(0, 0.7, -(-size_bytes // element_bytes)).astype(np.float32)
    return values.view(np.uint8).reshape(-1, 4)[:, 4 - element_bytes :].tobytes()[:size_bytes]


@dataclass
class Coding:
    """A tier's encoding and decoding, without the tier."""

    config: ChainConfig  # Its ``codec`` option.
    header_bytes: int = 256  # Length of its headers.
    unit: int = 1  # Alignment of its payloads.
    namespace: Namespace = NAMESPACE
    codecs: TierCodecs = field(init=False)
    records: RecordCodec = field(init=False)

    def __post_init__(self) -> None:
        self.codecs = TierCodecs(self.config, self.namespace)
        self.records = RecordCodec(
            self.namespace, header_bytes=self.header_bytes, writer_id=WRITER_ID, clock_ns=fixed_clock
        )

    def write(self, blocks: Sequence[bytes], *, encode: bool = True) -> list[bytes]:
        """Return the records of blocks, whose keys are their indexes."""
        encoder = Encoder(self.records, self.codecs.chain, unit=self.unit)
        keys = [key_of(place) for place in range(len(blocks))]
        headers = [memoryview(bytearray(self.header_bytes)) for _ in blocks]
        rows, spares = ([memoryview(bytearray(len(block) + self.unit)) for block in blocks] for _ in range(2))
        views = [memoryview(block) for block in blocks]
        payloads, error = encoder.encode(keys, headers, views, rows, spares, encode=encode)
        assert error == ""
        return [bytes(header) + bytes(body or b"") for header, body in zip(headers, payloads, strict=True)]

    def read(self, records: Sequence[bytes], slot_bytes: int) -> list[bytes | str]:
        """Return the block of each record, or the fault that makes it a miss."""
        found: list[bytes | str] = []
        stored: list[tuple[int, RecordHeader]] = []
        slots = []
        for place, record in enumerate(records):
            head = memoryview(bytearray(record[: self.header_bytes].ljust(self.header_bytes, b"\xc7")))
            payload = record[self.header_bytes :][:slot_bytes]
            slots.append(memoryview(bytearray(payload.ljust(slot_bytes, b"\xc7"))))
            try:
                good = self.records.check(key_of(place), head, slots[-1], len(record), self.codecs.decoder.refusal)
            except RecordError as error:
                found.append(RecordFault(error.cause).value)
                continue
            if good.codec_chain:
                stored.append((place, good))
            found.append(bytes(slots[-1][: good.plain_bytes]))
        rows, spares = ([memoryview(bytearray(slot_bytes)) for _ in stored] for _ in range(2))
        headers, targets = [header for _, header in stored], [slots[place] for place, _ in stored]
        errors = self.codecs.decoder.decode(headers, targets, rows, spares)
        for (place, header), failed in zip(stored, errors, strict=True):
            size = header.plain_bytes
            found[place] = bytes(slots[place][:size]) if failed is None else RecordFault(failed.cause).value
        return found


def key_of(place: int) -> bytes:
    """Return the key of the block at an index."""
    return b"key %d" % place
