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


class JobKind(enum.Enum):
    """Direction of a job."""

    STORE = "store"
    LOAD = "load"


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


class SubmitJob(_Message, frozen=True):
    """Store or load blocks; answered by exactly one :class:`JobDone`.

    ``job_id`` is unique among all jobs that the tier ever had. The row ``slots[i]`` of the primary tier belongs to
    ``keys[i]``. The answer is due by ``deadline``.
    """

    job_id: int
    kind: JobKind
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    deadline: float


class AskExistence(_Message, frozen=True):
    """Query the presence of keys; answered by one :class:`ExistsDone`.

    ``sources``: hand-overs that requests name for these blocks, all at one engine.
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
    """Store the lineage of blocks for an engine that recovers them at its start; not answered.

    ``secrets`` are stored as well, but only if the tier encrypts.
    """

    keys: tuple[bytes, ...]
    lineage: tuple[bytes, ...]
    secrets: tuple[bytes, ...]


class Probe(_Message, frozen=True):
    """Probe the medium until it works, then answer with :class:`ProbeDone`.

    The pause before the first attempt is ``pause_s``; it doubles after each failure, up to ``pause_s_max``. Each
    attempt may take ``timeout_s``.
    """

    pause_s: float
    pause_s_max: float
    timeout_s: float


class Drain(_Message, frozen=True):
    """Request for :class:`Drained`, sent once every job submitted earlier has been answered."""

    drain_id: int


class BeginEpoch(_Message, frozen=True):
    """Leave the present epoch when its jobs have ended; answered by :class:`EpochBegun`, unless another one follows.

    ``number`` ascends; 0 is the epoch at start, which needs no request. ``name`` is the epoch to enter; None means the
    epoch from the configured source, or a new one without a source.
    """

    number: int
    name: str | None


ToIO: TypeAlias = SubmitJob | AskExistence | Touch | Delete | Forget | KeepLineage | Probe | Drain | BeginEpoch


class JobDone(_Message, frozen=True):
    """The end of a job.

    ``outcomes`` has one byte per block, an ``Outcome``; ``size_bytes`` is the payload moved; ``seconds`` is the time
    from the start of the work; ``faults`` counts the records that failed verification, by cause; ``error`` is the text
    of the first failure, or empty.
    """

    job_id: int
    outcomes: bytes
    size_bytes: int
    seconds: float
    faults: dict[str, int]
    error: str


class ExistsDone(_Message, frozen=True):
    """Answer to :class:`AskExistence`: one byte per key, a ``Found``; empty if ``error`` gives a reason.

    ``sources`` has one byte per source of the question, as :meth:`PeerMedium.exists_at` returns them.
    """

    question_id: int
    found: bytes
    error: str
    sources: bytes = b""


class PresenceAdded(_Message, frozen=True):
    """New blocks of the tier; with ``recovered``, blocks from earlier runs.

    ``own``: this engine reports the blocks to consumers of events. Otherwise they are in another engine's part of the
    medium, and that engine reports them.
    """

    keys: tuple[bytes, ...]
    recovered: bool
    own: bool = True


class PresenceRemoved(_Message, frozen=True):
    """Blocks that the tier no longer holds."""

    keys: tuple[bytes, ...]
    cause: RemovalCause


class LineageFound(_Message, frozen=True):
    """Lineage stored by an earlier engine (see :class:`KeepLineage`); the blocks are reported later."""

    keys: tuple[bytes, ...]
    lineage: tuple[bytes, ...]
    secrets: tuple[bytes, ...]


class PresenceComplete(_Message, frozen=True):
    """Recovery has ended: from now on the presence of an authoritative medium is complete."""

    authoritative: bool
    blocks: int
    seconds: float


class ProbeDone(_Message, frozen=True):
    """The medium can be used again, after this many attempts."""

    tries: int


class Drained(_Message, frozen=True):
    """Answer to :class:`Drain`."""

    drain_id: int


class EpochBegun(_Message, frozen=True):
    """The tier is in the requested epoch: earlier messages concern blocks of other epochs, later ones its own.

    An empty ``name`` is the base epoch.
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
    ready: bool = True  # Whether the backend is open and can serve something.


class Forgotten(_Message, frozen=True):
    """Answer to :class:`Forget`, after all reports of removed blocks; with ``error``, some may remain."""

    prefix: bytes
    error: str


class HostDown(_Message, frozen=True):
    """The process of the I/O half has ended and no longer touches slots: its unanswered messages have failed."""

    reason: str


class HostUp(_Message, frozen=True):
    """A new process of the I/O half is running, without the state of the former one; it recovers its presence."""


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
        """Send messages in order; never waits for the I/O half. ``HostClosedError``: after ``close``."""

    def receive(self) -> FromIO | None:
        """Return the next answer, or None if none has arrived."""

    @property
    def pid(self) -> int | None:
        """Process id of the I/O half; None if it is a thread, or between two processes."""

    @property
    def has_answers(self) -> bool:
        """Whether an answer has arrived; may be called on any thread."""

    def hurry(self) -> None:
        """Note that a load is late, so that a stopped I/O half is detected soon; never waits."""

    def wait(self, timeout_s: float) -> bool:
        """Block until an answer has arrived; return whether one has. Not for an engine's scheduler."""

    def close(self, timeout_s: float) -> bool:
        """Close the I/O half; its answers can still be received. Idempotent.

        Returns:
            Whether it ended in time. If not, it may still touch slots.
        """
