"""Coding: blocks to headers and payloads, and payloads to blocks, a batch at a time.

Any number of threads may share an encoder or a decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.codec.base import THIRD_PARTY_WIRE_ID_MIN, Codec, Seal
from kvstore.codec.chain import RAW, CodecChain, decode_guarded, encode_all, unpack_chain
from kvstore.codec.record import RecordCodec, RecordFault, RecordHeader, associated_bytes
from kvstore.codec.rows import copy_rows
from kvstore.errors import RecordError
from kvstore.types import BlockKey

logger = logging.getLogger("kvstore.codec")

_SAVING_MIN: Final = 32
"""Inverse of the minimum saving for a block to be stored encoded; a smaller saving is not worth the decoding."""

_NOWHERE: Final = memoryview(b"")

_WARNED_MAX: Final = 64
"""Maximum number of distinct reasons for a miss that are logged, so that foreign records cannot fill the log."""


class Encoder:
    """Encodes, seals and writes headers.

    A payload is never longer than its block: a block that the codecs don't shorten is stored raw.

    ``unit``: payloads are padded with zeros to a multiple of this length, because a medium with direct I/O would copy
    other lengths; 1 for no padding.
    """

    def __init__(self, records: RecordCodec, chain: CodecChain, *, unit: int = 1) -> None:
        self._records = records
        self._chain = chain
        self._unit = unit
        self._wires = (chain.wire(encoded=False), chain.wire(encoded=True))
        self._hides = chain.seal is not None and chain.seal.hides

    def needs_rows(self, *, encode: bool) -> tuple[bool, bool]:
        """Return whether :meth:`encode` needs targets and whether it needs spares; ``encode`` as there."""
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
    ) -> tuple[list[memoryview | None], str]:
        """Make the records of a batch.

        Args:
            blocks: The blocks; only read, and must not change until the records are put.
            targets: Buffers as long as the blocks, for payloads other than the blocks themselves; in use until the
                records are put. Empty if :meth:`needs_rows` returns False for them.
            spares: The same, in use only during the call.
            encode: Whether to apply the codecs; if False, blocks are only sealed.

        Returns:
            The payload of each block: a view of the block itself or of its target, shorter than the block if it was
            encoded; None if the block can't be stored because the seal has no key. Then the reason for that, or "".

        Raises:
            ValueError: A buffer does not fit.
        """
        encode = encode and bool(self._chain.codecs)
        seal = self._chain.seal
        if seal is None and not encode:
            for key, header, block in zip(keys, headers, blocks, strict=True):
                self._records.encode_header(header, key, block)
            return [*blocks], ""
        # A seal that encrypts writes to the targets, so the output of the codecs must be in the spares.
        results, between = (spares, targets) if self._hides else (targets, spares)
        sizes = encode_all(self._chain.codecs, blocks, results, between) if encode else [None] * len(blocks)
        payloads: list[memoryview | None] = []
        error = ""
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
            if is_encoded:
                payloads.append(self._pad(targets[i], payload.nbytes, plain))
            else:
                payloads.append(sealed if self._hides else block)
        return payloads, error

    def _padded(self, size: int, plain_bytes: int) -> int:
        # At most the block's length, because a reader's buffer is no longer.
        return min(-(-size // self._unit) * self._unit, plain_bytes)

    def _pad(self, target: memoryview, size: int, plain_bytes: int) -> memoryview:
        padded = self._padded(size, plain_bytes)
        target[size:padded] = bytes(padded - size)
        return target[:padded]


class Decoder:
    """Opens and decodes payloads by the codec chains in their records, regardless of the tier's codecs for storing.

    Args:
        find: Returns the codec with a wire id; None if it is not installed.
        seal: Opens sealed payloads; None if this tier has no keys.
    """

    def __init__(self, find: Callable[[int], Codec | None], seal: Seal | None) -> None:
        self._find = find
        self._seal = seal
        self._warned: set[str] = set()

    def refusal(self, header: RecordHeader) -> str:
        """Return the reason why a payload with this header can't be read here; empty if it can. Logged once."""
        if header.codec_chain == RAW and header.mac_key_id == 0 and self._seal is None:
            return ""  # Most blocks; the code below would take a tenth of the load time of a small one.
        reason = self._refusal(header)
        if reason:
            self._warn(reason)
        return reason

    def decode(
        self,
        headers: Sequence[RecordHeader],
        slots: Sequence[memoryview],
        rows: Sequence[memoryview],
        spares: Sequence[memoryview],
    ) -> list[RecordError | None]:
        """Decode payloads into their slots.

        Args:
            headers: Verified headers that :meth:`refusal` accepts.
            slots: Buffers as long as the blocks; each begins with its payload and receives its block.
            rows: Buffers as long as the blocks, one per block.

        Returns:
            For each block None on success; otherwise the reason for a miss, and the slot's content is undefined.
        """
        errors: list[RecordError | None] = [None] * len(headers)
        chains: dict[int, list[int]] = {}
        for i, header in enumerate(headers):
            chains.setdefault(header.codec_chain, []).append(i)
        for chain, members in chains.items():
            wire_ids = list(unpack_chain(chain) or ())
            at = {i: slots[i][: headers[i].stored_bytes] for i in members}
            in_rows: set[int] = set()
            if headers[members[0]].mac_key_id:
                seal_id = wire_ids.pop()
                in_rows = self._open_all(seal_id, headers, at, rows if wire_ids else [], errors)
            # Codecs alternate between two sides, and the last one writes to the slot. The input of a single codec must
            # therefore leave the slot: the encoded payload is copied, because it is shorter than the block.
            if len(wire_ids) == 1 or in_rows:
                moved = [i for i in at if i not in in_rows]
                copy_rows([at[i] for i in moved], [rows[i][: at[i].nbytes] for i in moved])
                at.update({i: rows[i][: at[i].nbytes] for i in moved})
                self._run_codecs(wire_ids, headers, slots, at, (spares, rows), errors)
            else:
                self._run_codecs(wire_ids, headers, slots, at, (rows, spares), errors)
        return errors

    def _warn(self, reason: str) -> None:
        if reason not in self._warned and len(self._warned) < _WARNED_MAX:
            self._warned.add(reason)
            logger.warning("Blocks can't be read and count as misses: %s", reason)

    def _refusal(self, header: RecordHeader) -> str:
        wire_ids = unpack_chain(header.codec_chain)
        if wire_ids is None:
            return f"their codec chain is {header.codec_chain:#x}, which is none."
        if header.mac_key_id:
            if self._seal is None:
                return f"they are sealed with key {header.mac_key_id}, and this tier has no keys. Configure a seal."
            if not wire_ids or wire_ids[-1] not in self._seal.wire_ids:
                return f"they are sealed with key {header.mac_key_id} in a way that this tier's seal can't open."
            wire_ids = wire_ids[:-1]
        elif self._seal is not None and not self._seal.accepts_unsealed:
            return "they are not sealed, and this tier's seal does not accept that (accept_unsealed)."
        for wire_id in wire_ids:
            if self._find(wire_id) is None:
                return f"they are encoded by codec {wire_id}, which is not installed here, or not alone with this id."
        if not wire_ids and header.stored_bytes != header.plain_bytes:
            return "they are shorter than their blocks, but not encoded."
        return ""

    def _open_all(
        self,
        seal_id: int,
        headers: Sequence[RecordHeader],
        at: dict[int, memoryview],
        rows: Sequence[memoryview],
        errors: list[RecordError | None],
    ) -> set[int]:
        """Open payloads; return the positions of those now in their rows. Payloads that fail are removed from ``at``.

        Without rows they are opened in place.
        """
        moved = set()
        for i, payload in list(at.items()):
            header, out = headers[i], rows[i][: payload.nbytes] if rows else payload
            try:
                # Not None: refusal() rejects sealed payloads in a tier without a seal.
                if self._seal is not None and self._seal.open(
                    seal_id, header.mac_key_id, associated_bytes(header), header.mac, payload, out
                ):
                    at[i] = out
                    if rows:
                        moved.add(i)
            except RecordError as error:
                # The traceback references this frame, and the frame the error; this cycle would keep views of slots.
                errors[i] = error.with_traceback(None)
                del at[i]
        return moved

    def _run_codecs(
        self,
        wire_ids: Sequence[int],
        headers: Sequence[RecordHeader],
        slots: Sequence[memoryview],
        at: dict[int, memoryview],
        sides: tuple[Sequence[memoryview], Sequence[memoryview]],
        errors: list[RecordError | None],
    ) -> None:
        """Decode blocks, codec by codec in reverse order. Output alternates between the sides and ends in the slots."""
        for step, wire_id in enumerate(reversed(wire_ids)):
            codec = self._find(wire_id)
            members = list(at)
            last = step == len(wire_ids) - 1
            targets = slots if last else sides[step % 2]
            rooms = [targets[i][: headers[i].plain_bytes] for i in members]
            sizes: Sequence[int | None] = [None] * len(members)
            is_sound = True
            if codec is not None:
                sizes, is_sound = decode_guarded(codec, wire_id, [*at.values()], rooms)
            for i, room, size in zip(members, rooms, sizes, strict=True):
                if size is None or (last and size != room.nbytes):
                    errors[i] = self._not_decoded(wire_id, wire_ids, is_sound=is_sound)
                    del at[i]
                else:
                    at[i] = room[:size]

    def _not_decoded(self, wire_id: int, wire_ids: Sequence[int], *, is_sound: bool) -> RecordError:
        """Return the error for a verified payload that cannot be decoded."""
        if not is_sound:
            # The codec has a defect or lacks memory: the record may be intact.
            text = f"Not a block that can be decoded here: codec {wire_id} failed. It counts as a miss."
            return RecordError(text, RecordFault.CODEC)
        others = [one for one in wire_ids if one >= THIRD_PARTY_WIRE_ID_MIN]
        if not others:
            text = f"The payload is nothing that codec {wire_id} makes. It counts as a miss."
            return RecordError(text, RecordFault.ENCODING)
        # Third-party ids have no registry, so it may be another engine's intact block, from another codec or version
        # with the same id.
        reason = f"they are encoded by codec {others[-1]}, and the one that has this id here can't decode them."
        self._warn(reason)
        return RecordError(f"Not a block that can be decoded here: {reason} It counts as a miss.", RecordFault.CODEC)
