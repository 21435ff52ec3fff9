"""The interface of a transfer: copies between the engine's KV cache and the slots of the primary tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.runtime.messages import JobKind

Ids: TypeAlias = npt.NDArray[np.int64]
"""Numbers of blocks, slots or places; one axis."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Device blocks of one group and their places in the primary tier. All arrays have the same length."""

    group: int  # Number of the group of layers.
    blocks: Ids  # Numbers of blocks in the KV cache.
    slots: Ids  # Slot of each block.
    places: Ids  # Place of each block in its slot, 0 to ``blocks_per_slot - 1``.

    @classmethod
    def of(cls, blocks: Sequence[int] | Ids, slots: Sequence[int] | Ids, *, group: int = 0) -> BlockCopies:
        """Pair blocks with slots that hold one block each."""
        mine = _ids(slots)
        return cls(group, _ids(blocks), mine, np.zeros_like(mine))

    @classmethod
    def consecutive(
        cls,
        blocks: Sequence[int] | Ids,
        slots: Sequence[int] | Ids,
        *,
        blocks_per_slot: int,
        first: int = 0,
        group: int = 0,
    ) -> BlockCopies:
        """Pair consecutive blocks of a request with the slots that they fill.

        Args:
            slots: Slots in the same order; the last may be partly filled.
            first: Place of the first block in the first slot, or its number in the request.

        Raises:
            ValueError: The number of slots does not match the blocks.
        """
        ids, rows = _ids(blocks), _ids(slots)
        at = np.arange(first % blocks_per_slot, first % blocks_per_slot + len(ids), dtype=np.int64)
        needed = int(at[-1]) // blocks_per_slot + 1 if len(at) else 0
        if needed != len(rows):
            raise ValueError(
                f"{len(ids)} blocks from place {first % blocks_per_slot} fill {needed} slots, not {len(rows)}."
            )
        return cls(group, ids, rows[at // blocks_per_slot], at % blocks_per_slot)


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a submitted batch; each batch has exactly one."""

    handle: int  # As :meth:`Transfer.submit` returned it.
    kind: JobKind  # STORE (KV cache to slots) or LOAD (slots to KV cache).
    success: bool  # Whether every byte was copied. If not, the contents of the targets are undefined.
    size_bytes: int  # Bytes copied.
    seconds: float  # Duration of the copies, without queueing.
    error: str = ""  # Cause of a failure; otherwise "".


class Transfer(ABC):
    """Copies between the KV cache of one rank and the slots, asynchronously.

    Guarantees: batches take effect in the order of submission. A store reads blocks after all engine work submitted
    before it. No memory is accessed before :meth:`submit` or after the result. Between them, blocks and slots belong to
    the batch. Ranks with equal bytes take turns storing blocks, so a slot is complete when *all* ranks have reported.
    Each slot is in at most one batch, which bounds the work in flight.

    Not thread-safe: one call at a time.
    """

    @abstractmethod
    def submit(self, copies: Sequence[BlockCopies], kind: JobKind) -> int:
        """Begin to copy a batch; returns immediately.

        Args:
            kind: STORE copies from the KV cache to slots, LOAD from slots to the KV cache.

        Returns:
            A handle that is unique in this transfer.

        Raises:
            ValueError: A number is out of range, or a target occurs twice; nothing was copied.
        """

    @abstractmethod
    def poll(self) -> list[TransferResult]:
        """Return the results since the last call, each once, without waiting."""

    @abstractmethod
    def wait(self, handles: Collection[int] | None = None, timeout_s: float | None = None) -> bool:
        """Wait until batches have ended; their results stay for :meth:`poll`.

        Args:
            handles: The batches; by default all. Reported batches count as ended.
            timeout_s: Seconds; None for no limit.

        Returns:
            Whether all of them ended in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish running copies, fail queued batches, release all memory. Idempotent.

        Results stay for :meth:`poll`. The region may be closed afterwards.
        """


def _ids(values: Sequence[int] | Ids) -> Ids:
    # A copy: the caller may reuse its array while the batch runs.
    return np.array(values, dtype=np.int64).reshape(-1)
