"""Types shared by all layers: keys, outcomes, lookups, jobs and results.

All are plain values, which may be passed between the scheduler side and the I/O side.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

BlockKey: TypeAlias = bytes
"""Opaque bytes, 1 to ``KEY_BYTES_MAX`` long; equal keys (in one namespace) mean equal content."""

KEY_BYTES_MAX = 64
"""Longest key. Keys in hexadecimal become file and object names, and 64 bytes are enough for a SHA-512."""


def is_key(key: object) -> bool:
    """Return whether a value is a valid key."""
    return isinstance(key, bytes) and 0 < len(key) <= KEY_BYTES_MAX


class LookupResult(enum.Enum):
    """Answer of a tier to a lookup, with the terms of vLLM's ``LookupResult``."""

    MISS = "miss"
    HIT = "hit"
    RETRY = "retry"
    """Not known yet: repeat the call in the next step. Answered at most until the tier's lookup deadline."""
    HIT_PENDING = "hit_pending"
    """The block is being loaded into the primary tier. Only a TieringManager returns this."""


class Outcome(enum.IntEnum):
    """The result for one block of a job. Every block of a batch has its own."""

    OK = 0
    """Stored (completely published) or loaded (every check passed)."""
    EXISTS = 1
    """Store only: a record of this key already exists; counts as success."""
    MISS = 2
    """Load only: no such record."""
    CORRUPT = 3
    """Load only: the record failed verification; quarantined if damaged, hidden for a while if only unreadable here."""
    TIMEOUT = 4
    """The deadline passed before the block was finished."""
    NO_SPACE = 5
    """Store only: the medium is full, or the capacity or reserve is reached, and no block may be evicted.

    It opens the breaker of stores, as failures do.
    """
    SHED = 6
    """Store only: dropped because too much was in flight, or because the medium or the sealing key was unavailable."""
    IO_ERROR = 7
    """The medium failed."""
    CANCELLED = 8
    """Abandoned because the tier is closing."""
    REFUSED = 9
    """The medium refused (permissions, credentials, read-only)."""

    @property
    def ok(self) -> bool:
        """Whether the block is now at the job's destination."""
        return self in SUCCESSES

    @property
    def is_failure(self) -> bool:
        """Whether the breaker counts it: a failure of the medium."""
        return self in FAILURES


SUCCESSES = frozenset({Outcome.OK, Outcome.EXISTS})
"""Outcomes of a block that is now at its job's destination."""

FAILURES = frozenset({Outcome.TIMEOUT, Outcome.NO_SPACE, Outcome.IO_ERROR, Outcome.REFUSED})
"""Outcomes that the breaker counts: failures of the medium."""


class Found(enum.IntEnum):
    """Answer of a medium about a block. The codes are fixed: the peer protocol uses them too."""

    ABSENT = 0
    THERE = 1
    COMING = 2
    """Not present yet, but another engine is computing it for this one."""
    UNKNOWN = 3
    """The medium could not answer."""


class Medium(enum.Enum):
    """Kind of device of a tier, like vLLM's ``Medium``."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    """Whether a tier is behind a network, like vLLM's ``Locality``."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class RemovalCause(enum.StrEnum):
    """Reason why a block left a tier."""

    EVICTED = "evicted"
    REMOVED = "removed"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    LOST = "lost"
    """Expected on the medium but missing, usually because another process removed it."""


class MissCause(enum.StrEnum):
    """Reason why a tier did not deliver a block to a request.

    The manager of the tiers adds its own, from ``GATE`` on, and some of the first ones.
    """

    ABSENT = "absent"
    """The tier does not hold the block, and is not known to have held it: it was never stored there in this namespace,
    or left long ago."""
    EVICTED = "evicted"
    REMOVED = "removed"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    LOST = "lost"
    """The tier held the block; these are the values of :class:`RemovalCause`."""
    FAILED = "failed"
    """A lookup or a load of the block failed, for this request or a moment ago."""
    TIMEOUT = "timeout"
    """The tier did not answer the lookup, or end the load, in time."""
    RECOVERING = "recovering"
    """The same, during the scan of existing blocks."""
    BREAKER = "breaker"
    """The breaker of loads is open."""
    DOWN = "down"
    """The medium is not open, the I/O process has ended, or the tier is dead."""
    RESETTING = "resetting"
    """A new epoch is beginning."""
    GATE = "gate"
    """Computing was estimated to be faster than loading."""
    LATE = "late"
    """The load was abandoned, because it took longer than computing."""
    NO_ROOM = "no_room"
    """The primary tier had no room for the block, to load it now or to store it when it was computed before."""
    RATE = "rate"
    """The rate of the tenant was used up, for the load or for an earlier store."""
    MIN_USES = "min_uses"
    """The block has been computed before, fewer times than ``min_uses`` requires for a store."""
    STORE_POLICY = "store_policy"
    """The block has been computed before, by a request whose policy does not store it in the tier."""
    SHED = "shed"
    """It has been computed before, and its store was dropped or still waits: too much was in flight, or the tier took
    no stores."""
    NO_SPACE = "no_space"
    """It has been computed before, and the tier had no space for it."""
    STORE_FAILED = "store_failed"
    """It has been computed before, and its store failed for another reason."""
    POLICY = "policy"
    """The request's policy, or vLLM's ``kv_load_tiers``, does not load from the tier."""
    UNPROVEN = "unproven"
    """The blocks of the request are not proven to belong to their keys."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block found by a scan of a medium.

    Attributes:
        key: Key of the block.
        size_bytes: Length of its record.
        used_at: Last known use or write, seconds since the epoch; 0.0 if unknown.
        place: Location, for the backend that found it.
        fault: Set if the data cannot be read as a block: a ``RecordError`` for damage, a ``BackendError`` for a failure
            to read.
    """

    key: BlockKey
    size_bytes: int
    used_at: float = 0.0
    place: Any = None
    fault: Exception | None = None


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace on a medium.

    Attributes:
        hex: Its digest.
        fields: Fields of the digest; None if the medium does not store them.
        holder: Description of the engines that use it now; empty if there are none or they are unknown.
        used_at: Last known use, seconds since the epoch; 0.0 if unknown.
    """

    hex: str
    fields: dict[str, Any] | None = None
    holder: str = ""
    used_at: float = 0.0

    @property
    def model(self) -> str | None:
        """Name of the model whose blocks it holds; None if unknown."""
        fields = self.fields or {}
        model = fields.get("model") or fields.get("model_name")
        name = model.get("name") if isinstance(model, dict) else model
        return str(name) if name else None


class Source(NamedTuple):
    """Another engine that holds blocks of a request, as given by the request."""

    address: str  # Its ``"host:port"``.
    hand_over: bytes = b""  # Digest of the name of the request's hand-over; empty without one.


@dataclass(slots=True, eq=False)
class RequestContext:
    """The request for which a call is made.

    Attributes:
        request_id: Unique while the request lives.
        params: The request's own parameters for kvstore (``kv_transfer_params["kvstore"]`` under vLLM).
        load_tiers: Names of the tiers that the engine allows it to load from, regardless of ``params``; None for all.
        source: Engine that may hold its blocks.
        since: Time at which the request gave the source, monotonic seconds; earlier absences don't count.
        patience_s: Seconds after ``since`` for which the request waits for blocks that the source is still computing;
            0 to compute missing blocks here immediately.
        unheard_s: Seconds after ``since`` for which the source may not know of the request yet.
        hand_over_s: Seconds for which its blocks are kept for another engine; 0 to not keep them.
        hand_over: Digest of the other engine's name for this hand-over; empty without one.
        tag: Tag of its tenant, the first bytes of its blocks' keys; empty without tenants.
    """

    request_id: str
    params: Mapping[str, Any] = field(default_factory=dict)
    load_tiers: Sequence[str] | None = None
    source: Source | None = None
    since: float = 0.0
    patience_s: float = 0.0
    unheard_s: float = 1.0
    hand_over_s: float = 0.0
    hand_over: bytes = b""
    tag: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class TransferJob:
    """One submitted store or load of several blocks.

    Attributes:
        job_id: Unique among the unfinished jobs of a tier.
        keys: Keys, one per block, no duplicates.
        slots: Rows of the primary tier, parallel to ``keys``.
        ctx: Request of the job, if any.
    """

    job_id: int
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    ctx: RequestContext | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job; each job has exactly one.

    Attributes:
        job_id: As submitted.
        success: Whether every block succeeded.
        successful_keys: The blocks that succeeded, in the job's order.
        size_bytes: Payload bytes moved between the primary tier and the medium.
        seconds: Time from the start of the work to its end.
        outcomes: Outcome per block, in the job's order.
    """

    job_id: int
    success: bool
    successful_keys: Sequence[BlockKey]
    size_bytes: int = 0
    seconds: float = 0.0
    outcomes: Sequence[Outcome] = ()


@dataclass(frozen=True, slots=True)
class TierEvent:
    """Blocks entered a tier, left it or, with ``accessed``, were read; vLLM's ``BlockStored`` and ``BlockRemoved``.

    Attributes:
        keys: The blocks.
        cause: Cause of the removal; None if they did not leave.
        accessed: Whether they were read, and neither entered nor left.
    """

    keys: Sequence[BlockKey]
    cause: RemovalCause | None = None
    accessed: bool = False
