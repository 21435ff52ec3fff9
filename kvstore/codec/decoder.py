"""Decoder: makes blocks from stored payloads, a batch at a time, independent of the tier's codecs for storing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.codec.base import THIRD_PARTY_WIRE_ID_MIN, Codec, Seal
from kvstore.codec.chain import RAW, decode_guarded, unpack_chain
from kvstore.codec.record import RecordFault, RecordHeader, associated_bytes
from kvstore.codec.rows import copy_rows
from kvstore.errors import RecordError

__all__ = ["Decoder", "StoredBlock"]

logger = logging.getLogger("kvstore.codec")

_WARNED_MAX: Final = 64
"""Most different reasons for a miss that are logged, once each, so that foreign records cannot fill the log."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block with a verified record and an undecoded payload.

    Attributes:
        header: Its header.
        slot: Buffer that begins with the payload and receives the block; as long as the block.
    """

    header: RecordHeader
    slot: memoryview


class Decoder:
    """Opens and decodes payloads by the codec chains in their records. Any number of threads may share one.

    Args:
        find: Returns the codec with a wire id; None if it is not installed.
        seal: Opens sealed payloads; None if this tier has no keys.
    """

    def __init__(self, find: Callable[[int], Codec | None], seal: Seal | None) -> None:
        self._find = find
        self._seal = seal
        self._warned: set[str] = set()

    def refusal(self, header: RecordHeader) -> str:
        """Return the reason that payloads like this one can't be read here; empty if they can. Logged once."""
        if header.codec_chain == RAW and header.mac_key_id == 0 and self._seal is None:
            return ""  # Most blocks; the code below would take a tenth of the load time of a small one.
        reason = self._refusal(header)
        if reason:
            self._warn(reason)
        return reason

    def decode(
        self, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], spares: Sequence[memoryview]
    ) -> list[RecordError | None]:
        """Decode payloads into their slots.

        Args:
            blocks: Blocks that :meth:`refusal` accepts.
            rows: Buffers as long as the blocks, as many.
            spares: As many again.

        Returns:
            For each block None if its slot holds it; otherwise the reason for a miss, and the slot's content is
            undefined.
        """
        errors: list[RecordError | None] = [None] * len(blocks)
        chains: dict[int, list[int]] = {}
        for i, block in enumerate(blocks):
            chains.setdefault(block.header.codec_chain, []).append(i)
        for chain, members in chains.items():
            wire_ids = list(unpack_chain(chain) or ())
            at = {i: blocks[i].slot[: blocks[i].header.stored_bytes] for i in members}
            in_rows: set[int] = set()
            if blocks[members[0]].header.mac_key_id:
                seal_id = wire_ids.pop()
                in_rows = self._open_all(seal_id, blocks, at, rows if wire_ids else [], errors)
            # Codecs alternate between two sides, and the last one writes into the slot. So the input of a single codec
            # must not be in the slot: it is copied, because the encoded payload is the shorter one.
            if len(wire_ids) == 1 or in_rows:
                moved = [i for i in at if i not in in_rows]
                copy_rows([at[i] for i in moved], [rows[i][: at[i].nbytes] for i in moved])
                at.update({i: rows[i][: at[i].nbytes] for i in moved})
                self._run_codecs(wire_ids, blocks, at, (spares, rows), errors)
            else:
                self._run_codecs(wire_ids, blocks, at, (rows, spares), errors)
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
        blocks: Sequence[StoredBlock],
        at: dict[int, memoryview],
        rows: Sequence[memoryview],
        errors: list[RecordError | None],
    ) -> set[int]:
        """Open payloads; return the positions of those now in their rows. Payloads that fail are removed from ``at``.

        Without rows they are opened in place.
        """
        moved = set()
        for i, payload in list(at.items()):
            header, out = blocks[i].header, rows[i][: payload.nbytes] if rows else payload
            try:
                # Not None: refusal() rejects sealed payloads in a tier without a seal.
                if self._seal is not None and self._seal.open(
                    seal_id, header.mac_key_id, associated_bytes(header), header.mac, payload, out
                ):
                    at[i] = out
                    if rows:
                        moved.add(i)
            except RecordError as error:
                # Without its traceback: that holds this frame, which holds the error, and so views of slots for long.
                errors[i] = error.with_traceback(None)
                del at[i]
        return moved

    def _run_codecs(
        self,
        wire_ids: Sequence[int],
        blocks: Sequence[StoredBlock],
        at: dict[int, memoryview],
        sides: tuple[Sequence[memoryview], Sequence[memoryview]],
        errors: list[RecordError | None],
    ) -> None:
        """Undo the codecs of some blocks in reverse order, alternating between the sides, at last into the slots."""
        for step, wire_id in enumerate(reversed(wire_ids)):
            codec = self._find(wire_id)
            members = list(at)
            last = step == len(wire_ids) - 1
            targets = [blocks[i].slot if last else sides[step % 2][i] for i in members]
            rooms = [target[: blocks[i].header.plain_bytes] for i, target in zip(members, targets, strict=True)]
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
            # The codec has a defect or lacks memory: the record may be good.
            text = f"Not a block that can be decoded here: codec {wire_id} failed. It counts as a miss."
            return RecordError(text, RecordFault.CODEC)
        others = [one for one in wire_ids if one >= THIRD_PARTY_WIRE_ID_MIN]
        if not others:
            text = f"The payload is nothing that codec {wire_id} makes. It counts as a miss."
            return RecordError(text, RecordFault.ENCODING)
        # There is no registry of such ids, so it may be a good block of another engine, whose codec, or another version
        # of it, has the same id.
        reason = f"they are encoded by codec {others[-1]}, and the one that has this id here can't decode them."
        self._warn(reason)
        return RecordError(f"Not a block that can be decoded here: {reason} It counts as a miss.", RecordFault.CODEC)
