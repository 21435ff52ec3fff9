"""The interface of a transfer: copies between the engine's KV cache and the slots of the primary tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.runtime.messages import JobKind

__all__ = ["BlockCopies", "Ids", "Transfer", "TransferResult"]

Ids: TypeAlias = npt.NDArray[np.int64]
"""Numbers of blocks, slots or places; one axis."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Device blocks of one group, and where in the primary tier each of them belongs. All arrays have one length.

    Attributes:
        group: Number of the group of layers.
        blocks: Numbers of blocks in the KV cache.
        slots: Slot of each block.
        places: Place of each block in its slot, 0 to ``blocks_per_slot - 1``.
    """

    group: int
    blocks: Ids
    slots: Ids
    places: Ids

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
        """Pair the consecutive blocks of a request with the slots that they fill.

        Args:
            blocks: Numbers of the blocks, in the order of the request.
            slots: Slots in the same order; the last may be filled in part.
            blocks_per_slot: Blocks in a slot.
            first: Place of the first block in the first slot, or its number in the request.
            group: Number of the group of layers.

        Raises:
            ValueError: There are more or fewer slots than the blocks need.
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
    """What became of a submitted batch; each batch has exactly one.

    Attributes:
        handle: As :meth:`Transfer.submit` returned it.
        kind: STORE (KV cache to slots) or LOAD (slots to KV cache).
        success: Whether every byte was copied. If not, the targets hold anything and must not be used.
        size_bytes: Bytes copied.
        seconds: From the beginning of the copies to their end, time spent waiting in line not included.
        error: Why it failed; "" if it did not.
    """

    handle: int
    kind: JobKind
    success: bool
    size_bytes: int
    seconds: float
    error: str = ""


class Transfer(ABC):
    """Copies between the KV cache of one rank and the slots, asynchronously.

    Guarantees: batches have the effect that they would have one after the other, in the order in which they were
    submitted. A store reads blocks as they are when the engine's work that was submitted before it is done. Nothing is
    touched before :meth:`submit` or after its result was reported. Blocks and slots of a batch belong to it until then.
    Where several ranks hold the same bytes, each stores only the blocks whose turn it has, so a slot is whole when
    *all* ranks have reported. How much may be under way is bounded by the slots: each is in one batch at most.

    All methods are called from one thread at a time.
    """

    @abstractmethod
    def submit(self, copies: Sequence[BlockCopies], kind: JobKind) -> int:
        """Begin to copy a batch; returns at once.

        Args:
            copies: What belongs where, for each group concerned.
            kind: STORE copies from the KV cache to slots, LOAD from slots to the KV cache.

        Returns:
            A handle that is unique in this transfer.

        Raises:
            ValueError: A number is out of range, or a target is named twice; nothing was copied.
        """

    @abstractmethod
    def poll(self) -> list[TransferResult]:
        """Return what ended since the last call, each batch once; doesn't wait."""

    @abstractmethod
    def wait(self, handles: Collection[int] | None = None, timeout_s: float | None = None) -> bool:
        """Wait until batches have ended; their results stay for :meth:`poll`.

        Args:
            handles: The batches; by default all. Those reported already count as ended.
            timeout_s: How long, in seconds; None for as long as it takes.

        Returns:
            Whether all of them ended in time.
        """

    @abstractmethod
    def close(self) -> None:
        """End what is under way (what has not begun is reported as failed) and let go of all memory. Idempotent.

        Results stay for :meth:`poll`. The region may be closed afterwards.
        """


def _ids(values: Sequence[int] | Ids) -> Ids:
    # A copy: the caller may use its array again while the batch is under way.
    return np.array(values, dtype=np.int64).reshape(-1)
