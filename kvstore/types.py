"""Words that all layers share: keys, outcomes, lookups, jobs and what they report.

The terms are those of the glossary in CONVENTIONS.md. Nothing here does I/O, and everything here may cross from the
scheduler side to the I/O side.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "KEY_BYTES_MAX",
    "BlockInfo",
    "BlockKey",
    "Found",
    "JobResult",
    "Locality",
    "LookupResult",
    "Medium",
    "NamespaceInfo",
    "Outcome",
    "RemovalCause",
    "RequestContext",
    "Source",
    "TierEvent",
    "TransferJob",
]

BlockKey: TypeAlias = bytes
"""Opaque bytes, 1 to ``KEY_BYTES_MAX`` long; equal keys (in one namespace) mean equal content."""

KEY_BYTES_MAX = 64
"""Longest key. A key becomes a file name (hex) or object name as it is, and 64 bytes hold a SHA-512."""


class LookupResult(enum.Enum):
    """Answer of a tier to "do you have this block?" (terms of vLLM's ``LookupResult``)."""

    MISS = "miss"
    HIT = "hit"
    RETRY = "retry"
    """Not known yet: ask again in the next step. Never for longer than the tier's lookup deadline."""
    HIT_PENDING = "hit_pending"
    """The block is on its way into the primary tier. Only a TieringManager says so, never a tier."""


class Outcome(enum.IntEnum):
    """What became of one block of a job. Every block of a batch has its own."""

    OK = 0
    """Stored (published whole) or loaded (every check passed)."""
    EXISTS = 1
    """Store only: a record of this key was there already; counts as success."""
    MISS = 2
    """Load only: no such record."""
    CORRUPT = 3
    """Load only: a record was there and failed verification; handed to quarantine."""
    TIMEOUT = 4
    """The deadline passed before the block was done."""
    NO_SPACE = 5
    """Store only: medium full, capacity or reserve reached, and nothing more may be evicted for it."""
    SHED = 6
    """Store only: dropped on purpose because too much was in flight."""
    IO_ERROR = 7
    """The medium failed."""
    CANCELLED = 8
    """Given up because the tier is closing."""
    REFUSED = 9
    """The medium refused (permissions, credentials, read-only)."""

    @property
    def ok(self) -> bool:
        """Whether the block is now where the job wanted it."""
        return self <= Outcome.EXISTS

    @property
    def is_failure(self) -> bool:
        """Whether this speaks against the health of the medium (what the breaker counts)."""
        return self in _FAILURES


_FAILURES = frozenset({Outcome.TIMEOUT, Outcome.IO_ERROR, Outcome.REFUSED})


class Found(enum.IntEnum):
    """Answer of a medium that was asked for a block. The codes are fixed: the peer protocol has them too."""

    ABSENT = 0
    THERE = 1
    COMING = 2
    """Not there yet: another engine is computing it for this one. Ask again."""
    UNKNOWN = 3
    """The medium could not say."""


class Medium(enum.Enum):
    """Kind of device that a tier lies on, as vLLM's ``Medium``."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    """Whether a tier is reached over a network, as vLLM's ``Locality``."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class RemovalCause(enum.StrEnum):
    """Why a block left a tier."""

    EVICTED = "evicted"
    REMOVED = "removed"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    LOST = "lost"
    """It should have been there and was not: somebody else took it away."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block as a scan of a medium found it.

    Attributes:
        key: Key of the block.
        size_bytes: Length of its record.
        used_at: Last known use or write, seconds since the epoch; 0.0 if unknown.
        place: Location, for the backend that found it.
        fault: Set if the medium has something here that cannot be read as a block: a ``RecordError`` for damage, a
            ``BackendError`` for a failure to read.
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
        fields: What the digest was made from; None if the medium does not store it.
        holder: Description of the engines that use it now; empty if none do or the medium cannot tell.
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
        return next((str(fields[name]) for name in ("model", "model_name") if fields.get(name)), None)


class Source(NamedTuple):
    """Another engine that a request names as the one that has its blocks.

    Attributes:
        address: Where it listens, ``"host:port"``.
        hand_over: Digest of the name under which it hands the request over; empty if there is none.
    """

    address: str
    hand_over: bytes = b""


@dataclass(slots=True, eq=False)
class RequestContext:
    """The request on whose behalf a call is made.

    Attributes:
        request_id: Unique while the request lives.
        params: The request's own parameters for kvstore (``kv_transfer_params["kvstore"]`` under vLLM).
        load_tiers: Names of the tiers that the engine lets it load from, whatever ``params`` say; None for all.
        source: Engine that is said to have its blocks.
        since: When it named the source, monotonic seconds; what was not there before may be there.
        patience_s: How long after ``since`` the source may still be computing the blocks; the request waits for them
            meanwhile. 0: what is not there at once is computed here.
        hand_over_s: How long its blocks are kept for another engine that is to fetch them; 0: they are for none.
        hand_over: Digest of the name that the other engine has for this; empty if there is none.
        tag: Tag of its tenant, with which the keys of its blocks begin; empty without tenants.
    """

    request_id: str
    params: Mapping[str, Any] = field(default_factory=dict)
    load_tiers: Sequence[str] | None = None
    source: Source | None = None
    since: float = 0.0
    patience_s: float = 0.0
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
        ctx: Request it is for, if any.
    """

    job_id: int
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    ctx: RequestContext | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job; each job has exactly one.

    Attributes:
        job_id: As submitted.
        success: Whether every block is where it should be.
        successful_keys: The blocks that are, in the job's order; also meaningful when ``success`` is false.
        size_bytes: Payload bytes that really moved between the primary tier and the medium.
        seconds: From the start of the work to its end.
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
    """Blocks entered or left a tier (vLLM's ``BlockStored`` and ``BlockRemoved``).

    Attributes:
        keys: The blocks.
        cause: Why they left; None if they were stored.
    """

    keys: Sequence[BlockKey]
    cause: RemovalCause | None = None
