"""What became of the blocks of a job, and of the batches that it was cut into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.backends.base import outcome_of
from kvstore.codec.record import RecordFault
from kvstore.errors import RecordError
from kvstore.types import BlockKey, Outcome

__all__ = ["Batch", "Tally"]


class Tally:
    """What became of a job so far; batches write to it as they end, so that a deadline keeps what was done.

    Attributes:
        outcomes: One byte per block of the job; TIMEOUT until something else is known.
        faults: Records that failed verification, by cause.
        size_bytes: Payload bytes moved.
        error: Text of the first failure.
        suspects: Keys of records that are to be set aside.
        refused: Keys of records that are there, may be good, and can't be read here.
        removed: Keys of blocks that were removed after they were submitted: what is put of them is deleted again.
    """

    def __init__(self, blocks: int) -> None:
        self.outcomes = bytearray([Outcome.TIMEOUT]) * blocks
        self.faults: Counter[str] = Counter()
        self.size_bytes = 0
        self.error = ""
        self.suspects: list[BlockKey] = []
        self.refused: list[BlockKey] = []
        self.removed: set[BlockKey] = set()

    def note_error(self, error: str) -> None:
        """Keep the text of the first failure."""
        self.error = self.error or error

    def note_failures(self, outcomes: Sequence[Outcome], error: str) -> None:
        """Keep the text of the first failure of the medium, if one of the outcomes is one."""
        if any(outcome.is_failure for outcome in outcomes):
            self.note_error(error)

    def settle_rest(self, outcome: Outcome) -> None:
        """Give the blocks of which nothing is known yet an outcome."""
        self.outcomes = self.outcomes.replace(bytes([Outcome.TIMEOUT]), bytes([outcome]))


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of a job: which blocks, until when their slots are the job's, and where it keeps their outcomes."""

    keys: Sequence[BlockKey]
    slots: Sequence[int]
    start: int
    tally: Tally
    deadline: float

    def fail(self, error: BaseException) -> None:
        """Count an error that concerns every block of the batch."""
        self.tally.outcomes[self.start : self.start + len(self.keys)] = bytes([outcome_of(error)]) * len(self.keys)
        self.tally.note_error(f"{type(error).__name__}: {error}")

    def settle_loaded(self, index: int, size_bytes: int, error: RecordError | None) -> None:
        """Write what became of a block that the medium had, and that was (or was not) found good."""
        if error is None:
            self.tally.outcomes[self.start + index] = Outcome.OK
            self.tally.size_bytes += size_bytes
            return
        fault = RecordFault(error.cause)
        self.settle_failed(index, Outcome.CORRUPT, fault, set_aside=fault.is_damage)
        self.tally.note_error(str(error))

    def settle_failed(self, index: int, outcome: Outcome, fault: RecordFault, *, set_aside: bool) -> None:
        """Write what became of a block that is not in its slot; ``fault`` and ``set_aside`` count if it is corrupt."""
        self.tally.outcomes[self.start + index] = outcome
        if outcome is Outcome.CORRUPT:
            self.tally.faults[fault.value] += 1
            (self.tally.suspects if set_aside else self.tally.refused).append(self.keys[index])
