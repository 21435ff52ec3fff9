"""Messages between the scheduler side and the I/O side.

Plain values without shared state, which may cross a thread or a process. Blocks are identified by key and slot (row of
the primary tier), never by a Python buffer. Times are ``time.monotonic()`` values, which all processes of one machine
share.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

from kvstore.types import RemovalCause, Source

__all__ = [
    "AskExistence",
    "BeginEpoch",
    "Channel",
    "Delete",
    "Drain",
    "Drained",
    "EpochBegun",
    "ExistsDone",
    "Forget",
    "Forgotten",
    "FromIO",
    "HostDown",
    "HostUp",
    "JobDone",
    "JobKind",
    "KeepLineage",
    "LineageFound",
    "PresenceAdded",
    "PresenceComplete",
    "PresenceRemoved",
    "Probe",
    "ProbeDone",
    "StatsReport",
    "SubmitJob",
    "ToIO",
    "Touch",
]


class JobKind(enum.Enum):
    """Direction of a job."""

    STORE = "store"
    LOAD = "load"


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


class SubmitJob(_Message, frozen=True):
    """Store or load blocks; answered by exactly one :class:`JobDone`.

    Attributes:
        job_id: Number of the job, unique among all that the tier ever had.
        kind: Direction.
        keys: Keys of the blocks.
        slots: Rows of the primary tier, parallel to ``keys``.
        deadline: Monotonic time by which the answer is due.
    """

    job_id: int
    kind: JobKind
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    deadline: float


class AskExistence(_Message, frozen=True):
    """Ask for the presence of keys; answered by one :class:`ExistsDone`.

    Attributes:
        question_id: Number of the question.
        keys: Keys of the blocks.
        deadline: Monotonic time by which the answer is due.
        sources: Engines that requests name as holders of these blocks.
    """

    question_id: int
    keys: tuple[bytes, ...]
    deadline: float
    sources: tuple[Source, ...] = ()


class Touch(_Message, frozen=True):
    """Note a use of blocks; not answered."""

    keys: tuple[bytes, ...]


class Delete(_Message, frozen=True):
    """Remove blocks; answered by :class:`PresenceRemoved` for those that existed."""

    keys: tuple[bytes, ...]


class Forget(_Message, frozen=True):
    """Remove all blocks whose keys begin with a prefix; answered by :class:`Forgotten`."""

    prefix: bytes


class KeepLineage(_Message, frozen=True):
    """Keep the lineage of blocks for the engine that finds them at its start; not answered.

    Attributes:
        keys: The blocks.
        lineage: What is kept of each.
        secrets: What is kept besides where the tier encrypts.
    """

    keys: tuple[bytes, ...]
    lineage: tuple[bytes, ...]
    secrets: tuple[bytes, ...]


class Probe(_Message, frozen=True):
    """Probe the medium, with growing pauses, until it answers; answered by :class:`ProbeDone` then.

    Attributes:
        pause_s: Before the first try; doubled after each failure.
        pause_s_max: Longest pause.
        timeout_s: For each try.
    """

    pause_s: float
    pause_s_max: float
    timeout_s: float


class Drain(_Message, frozen=True):
    """Answered by :class:`Drained` when every job submitted before it has been answered."""

    drain_id: int


class BeginEpoch(_Message, frozen=True):
    """Leave the present epoch when its jobs have ended; answered by :class:`EpochBegun`, unless another one follows.

    Attributes:
        number: Ascending; 0 is the epoch at start, which needs no request.
        name: The epoch to enter; None: the one named by the configured source, else a new one.
    """

    number: int
    name: str | None


ToIO: TypeAlias = SubmitJob | AskExistence | Touch | Delete | Forget | KeepLineage | Probe | Drain | BeginEpoch


class JobDone(_Message, frozen=True):
    """A job's end.

    Attributes:
        job_id: As submitted.
        outcomes: One byte per block, an ``Outcome``.
        size_bytes: Payload bytes moved between the primary tier and the medium.
        seconds: From the start of the work to its end.
        faults: Counts by cause of records that failed verification.
        error: Text of the first failure, for the log; empty if there was none.
    """

    job_id: int
    outcomes: bytes
    size_bytes: int
    seconds: float
    faults: dict[str, int]
    error: str


class ExistsDone(_Message, frozen=True):
    """Answer to :class:`AskExistence`: one byte per key, a ``Found``.

    With ``error`` set, every key is unknown.

    Attributes:
        question_id: As asked.
        found: The answers.
        error: Why there are none.
        waiting: The sources that hand a request over whose blocks they do not know yet.
    """

    question_id: int
    found: bytes
    error: str
    waiting: tuple[Source, ...] = ()


class PresenceAdded(_Message, frozen=True):
    """Blocks that the tier holds from now on.

    Attributes:
        keys: The blocks.
        recovered: Whether they were there at the start.
        own: Whether this engine reports them to consumers of events. Blocks in other engines' parts of a medium are
            reported by those.
    """

    keys: tuple[bytes, ...]
    recovered: bool
    own: bool = True


class PresenceRemoved(_Message, frozen=True):
    """Blocks that the tier no longer holds."""

    keys: tuple[bytes, ...]
    cause: RemovalCause


class LineageFound(_Message, frozen=True):
    """Lineage that an earlier engine left; the blocks are reported later.

    Attributes:
        keys: The blocks.
        lineage: As in :class:`KeepLineage`.
        secrets: As in :class:`KeepLineage`; empty where the tier does not encrypt.
    """

    keys: tuple[bytes, ...]
    lineage: tuple[bytes, ...]
    secrets: tuple[bytes, ...]


class PresenceComplete(_Message, frozen=True):
    """Recovery has ended: from now on the presence of an exclusive tier is authoritative."""

    exclusive: bool
    blocks: int
    seconds: float


class ProbeDone(_Message, frozen=True):
    """The medium can be used again.

    Attributes:
        tries: Probes it took.
    """

    tries: int


class Drained(_Message, frozen=True):
    """Answer to :class:`Drain`."""

    drain_id: int


class EpochBegun(_Message, frozen=True):
    """The tier is in an epoch: later messages are about its blocks, earlier ones about other blocks.

    Attributes:
        number: As asked for.
        name: Its name; empty: the base epoch.
    """

    number: int
    name: str


class StatsReport(_Message, frozen=True):
    """A snapshot of the I/O side, sent periodically and before :class:`Drained`."""

    blocks: int
    used_bytes: int
    capacity_bytes: int
    counters: dict[str, int]
    gauges: dict[str, float]
    codec: dict[str, float] = {}


class Forgotten(_Message, frozen=True):
    """Answer to :class:`Forget`, after all reports of removed blocks.

    Attributes:
        prefix: As asked.
        error: Why some may be left; empty if none is.
    """

    prefix: bytes
    error: str


class HostDown(_Message, frozen=True):
    """The process of the I/O half has ended and touches no slot any more: its unanswered messages have failed."""

    reason: str


class HostUp(_Message, frozen=True):
    """A new process of the I/O half is running; it has no state of the former one, and recovers its presence."""


FromIO: TypeAlias = (
    JobDone
    | ExistsDone
    | PresenceAdded
    | PresenceRemoved
    | LineageFound
    | PresenceComplete
    | ProbeDone
    | Drained
    | EpochBegun
    | StatsReport
    | Forgotten
    | HostDown
    | HostUp
)


class Channel(Protocol):
    """The scheduler side's end of a tier; used by one thread at a time."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""

    def open(self, timeout_s: float) -> None:
        """Open the I/O half, and wait until it is open.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
            KVStoreError: The I/O half could not be opened.
        """

    def send(self, messages: Sequence[ToIO]) -> None:
        """Hand over messages, in order; never waits for the I/O half.

        Raises:
            HostClosedError: After ``close``.
        """

    def receive(self) -> FromIO | None:
        """Return the next answer, or None if there is none now."""

    def hurry(self) -> None:
        """Note that a load is late, so that a stopped I/O half is detected soon; never waits."""

    def wait(self, timeout_s: float) -> bool:
        """Block until an answer has arrived; return whether one has. For start, drain and close only."""

    def close(self, timeout_s: float) -> bool:
        """Close the I/O half; its answers can still be received. Idempotent.

        Returns:
            Whether it ended in time. If not, it may still touch slots.
        """
