"""What a tier tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["JobSample", "TierStats"]


@dataclass(frozen=True, slots=True)
class JobSample:
    """One job that ended, for latency histograms.

    Attributes:
        kind: ``"store"`` or ``"load"``.
        blocks: Blocks that the medium was asked for.
        size_bytes: Payload bytes moved.
        seconds: From the start of the work to its end.
    """

    kind: str
    blocks: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """A moment's view of a tier. All counts are monotonic since the tier was opened.

    Attributes:
        name: Name of the tier.
        epoch: Name of the present epoch; empty: the base epoch; None while it changes.
        recovering: Whether the scan of what earlier runs left is still going on.
        blocks: Blocks held, as far as known.
        used_bytes: Bytes they take on the medium.
        capacity_bytes: Limit for ``used_bytes``; 0 if there is none.
        lookups: Lookup answers by result (``hit``, ``miss``, ``retry``).
        outcomes: Blocks by ``"store.ok"``, ``"load.miss"``, … (job kind and outcome).
        faults: Records that failed verification, by cause.
        removals: Blocks that left, by cause.
        bytes_stored: Payload bytes moved to the medium.
        bytes_loaded: Payload bytes moved from the medium.
        jobs_in_flight: Jobs submitted and not reported.
        bytes_in_flight: Their payload bytes.
        shed_blocks: Blocks not stored because too much was in flight, or because the store breaker was open.
        load_breaker: ``"closed"``, ``"open"`` or ``"half_open"``.
        store_breaker: The same for stores.
        last_error: Text of the last failure; empty if there was none.
        backend_counters: The backend's own counts.
        backend_gauges: The backend's own gauges, and ``unreadable_blocks``: records remembered as there but not
            readable here.
        codec: What the codecs did, empty while they did nothing: ``encoded_blocks`` and ``raw_blocks`` (stored by a
            tier with codecs or a seal; raw: not made shorter), ``encode_in_bytes``, ``encode_out_bytes``,
            ``encode_seconds``, the same four for ``decode``, and ``ratio`` (bytes out by bytes in, of stores).
    """

    name: str
    epoch: str | None = ""
    recovering: bool = False
    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    lookups: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    removals: dict[str, int] = field(default_factory=dict)
    bytes_stored: int = 0
    bytes_loaded: int = 0
    jobs_in_flight: int = 0
    bytes_in_flight: int = 0
    shed_blocks: int = 0
    load_breaker: str = "closed"
    store_breaker: str = "closed"
    last_error: str = ""
    backend_counters: dict[str, int] = field(default_factory=dict)
    backend_gauges: dict[str, float] = field(default_factory=dict)
    codec: dict[str, float] = field(default_factory=dict)
