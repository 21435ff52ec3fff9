"""Messages between the scheduler side and the I/O side.

They are plain values: nothing in them is shared, so that they can cross a thread or a process. Blocks are named by key
and slot (row of the primary tier), never by a Python buffer. Times are ``time.monotonic()`` values, which all processes
of one machine share.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from kvstore.types import RemovalCause

__all__ = [
    "BeginEpoch",
    "Delete",
    "Drain",
    "Drained",
    "EpochBegun",
    "ExistsBatch",
    "ExistsDone",
    "FromIO",
    "HostDown",
    "HostUp",
    "JobDone",
    "JobKind",
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
        deadline: Monotonic time by which it has to be answered.
    """

    job_id: int
    kind: JobKind
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    deadline: float


class ExistsBatch(_Message, frozen=True):
    """Ask for the presence of keys; answered by one :class:`ExistsDone`."""

    batch_id: int
    keys: tuple[bytes, ...]
    deadline: float


class Touch(_Message, frozen=True):
    """Note a use of blocks; not answered."""

    keys: tuple[bytes, ...]


class Delete(_Message, frozen=True):
    """Remove blocks; answered by :class:`PresenceRemoved` for those that there were."""

    keys: tuple[bytes, ...]


class Probe(_Message, frozen=True):
    """Probe the medium, with growing pauses, until it can be used again; answered by :class:`ProbeDone` then.

    Attributes:
        pause_s: Before the first try; doubled after each failure.
        pause_s_max: Longest pause.
        timeout_s: For each try.
    """

    pause_s: float
    pause_s_max: float
    timeout_s: float


class Drain(_Message, frozen=True):
    """Ask to be told when every job submitted before this has been answered."""

    drain_id: int


class BeginEpoch(_Message, frozen=True):
    """Leave the present epoch when its jobs have ended; answered by :class:`EpochBegun`, unless another one follows.

    Attributes:
        number: Ascending; 0 is the epoch of the start, which nobody asks for.
        name: The epoch to enter; None: the one that its source names, or else a new one.
    """

    number: int
    name: str | None


ToIO: TypeAlias = SubmitJob | ExistsBatch | Touch | Delete | Probe | Drain | BeginEpoch


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
    """Answer to :class:`ExistsBatch`: one byte per key (0, 1, or 2 where the medium could not say).

    With ``error`` set, nothing is known of any key.
    """

    batch_id: int
    found: bytes
    error: str


class PresenceAdded(_Message, frozen=True):
    """Blocks that the tier holds from now on (recovered at start, or put)."""

    keys: tuple[bytes, ...]
    recovered: bool


class PresenceRemoved(_Message, frozen=True):
    """Blocks that the tier no longer holds."""

    keys: tuple[bytes, ...]
    cause: RemovalCause


class PresenceComplete(_Message, frozen=True):
    """Recovery has ended: from now on an exclusive tier's presence is all there is."""

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
    """The tier is in an epoch: every message after this one is about its blocks, every one before about others.

    Attributes:
        number: As asked for.
        name: Its name; empty: the base epoch.
    """

    number: int
    name: str


class StatsReport(_Message, frozen=True):
    """A moment's view of the I/O side, sent now and then and when asked to drain."""

    blocks: int
    used_bytes: int
    capacity_bytes: int
    counters: dict[str, int]
    gauges: dict[str, float]
    codec: dict[str, float] = {}


class HostDown(_Message, frozen=True):
    """The process of the I/O half has ended, and touches no slot any more: what it had not answered has failed."""

    reason: str


class HostUp(_Message, frozen=True):
    """A new process of the I/O half is at work; it knows nothing of what was before, and recovers its presence."""


FromIO: TypeAlias = (
    JobDone
    | ExistsDone
    | PresenceAdded
    | PresenceRemoved
    | PresenceComplete
    | ProbeDone
    | Drained
    | EpochBegun
    | StatsReport
    | HostDown
    | HostUp
)
