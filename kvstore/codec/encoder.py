"""Encoder: makes headers and payloads of records from blocks, a batch at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.codec.chain import CodecChain
from kvstore.codec.record import RecordCodec
from kvstore.errors import RecordError
from kvstore.types import BlockKey

__all__ = ["EncodedBatch", "Encoder"]

_SAVING_MIN: Final = 32
"""Inverse of the least saving for which a block is stored encoded; a smaller saving is not worth decoding."""

_NOWHERE: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """The records of a batch.

    Attributes:
        payloads: Payload of each header: a view of the block itself, or of its target. None if the block can't be
            stored, because the seal has no key.
        stored_bytes: Bytes of all payloads together.
        encoded_blocks: Number of blocks that the codecs shortened.
        seconds: Time for codecs, seal, headers and checksums.
        error: Reason that a block can't be stored; empty if all can.
    """

    payloads: list[memoryview | None]
    stored_bytes: int
    encoded_blocks: int
    seconds: float
    error: str


class Encoder:
    """Encodes, seals and writes headers. Any number of threads may share one.

    A payload is never longer than its block: a block that the codecs don't shorten is stored raw.

    Args:
        records: Makes the headers.
        chain: Steps of the tier.
        unit: Payloads are padded with zeros to a multiple of this length, because a medium with direct I/O would copy
            other lengths; 1 for no padding.
    """

    def __init__(self, records: RecordCodec, chain: CodecChain, *, unit: int = 1) -> None:
        self._records = records
        self._chain = chain
        self._unit = unit
        self._wires = (chain.wire(encoded=False), chain.wire(encoded=True))
        self._hides = chain.seal is not None and chain.seal.hides

    def needs_rows(self, *, encode: bool) -> tuple[bool, bool]:
        """Return whether :meth:`encode` needs targets, and spares, with or without the codecs."""
        codecs = len(self._chain.codecs) if encode else 0
        return self._hides or codecs > 0, codecs > 1 or (self._hides and codecs > 0)

    def encode(
        self,
        keys: Sequence[BlockKey],
        headers: Sequence[memoryview],
        blocks: Sequence[memoryview],
        targets: Sequence[memoryview],
        spares: Sequence[memoryview],
        *,
        encode: bool,
    ) -> EncodedBatch:
        """Make the records of a batch.

        Args:
            keys: Keys of the blocks.
            headers: Buffers that the headers are written to.
            blocks: The blocks; only read, and must not change until the records are put.
            targets: Buffers as long as the blocks, for payloads other than the blocks themselves; in use until the
                records are put. Empty if :meth:`needs_rows` returns false for them.
            spares: The same, in use only during the call.
            encode: Whether to apply the codecs; without, blocks are only sealed.

        Raises:
            ValueError: A buffer does not fit.
        """
        started = time.perf_counter()
        seal = self._chain.seal
        if seal is None and not (encode and self._chain.codecs):
            for key, header, block in zip(keys, headers, blocks, strict=True):
                self._records.encode_header(header, key, block)
            stored = sum(block.nbytes for block in blocks)
            return EncodedBatch([*blocks], stored, 0, time.perf_counter() - started, "")
        sizes: list[int | None] = [None] * len(blocks)
        # A seal that encrypts writes to the targets, so the output of the codecs must be in the spares.
        results, between = (spares, targets) if self._hides else (targets, spares)
        if encode and self._chain.codecs:
            sizes = self._chain.encode(blocks, results, between)
        payloads: list[memoryview | None] = []
        encoded_blocks, stored_bytes, error = 0, 0, ""
        for i, (key, header, block, size) in enumerate(zip(keys, headers, blocks, sizes, strict=True)):
            plain = block.nbytes
            is_encoded = size is not None and self._padded(size, plain) <= plain - max(1, plain // _SAVING_MIN)
            payload = results[i][:size] if is_encoded else block
            sealed = targets[i][: payload.nbytes] if self._hides else _NOWHERE
            chain = self._wires[is_encoded]
            try:
                self._records.encode_header(
                    header, key, payload, plain_bytes=plain, chain=chain, seal=seal, sealed=sealed
                )
            except RecordError as failure:
                payloads.append(None)
                error = error or str(failure)
                continue
            stored_bytes += payload.nbytes
            if is_encoded:
                encoded_blocks += 1
                payloads.append(self._pad(targets[i], payload.nbytes, plain))
            else:
                payloads.append(sealed if self._hides else block)
        return EncodedBatch(payloads, stored_bytes, encoded_blocks, time.perf_counter() - started, error)

    def _padded(self, size: int, plain_bytes: int) -> int:
        # At most the block's length: a reader has no more room.
        return min(-(-size // self._unit) * self._unit, plain_bytes)

    def _pad(self, target: memoryview, size: int, plain_bytes: int) -> memoryview:
        padded = self._padded(size, plain_bytes)
        target[size:padded] = bytes(padded - size)
        return target[:padded]
