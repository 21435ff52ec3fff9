"""Scrub and gc for the medium of any backend, as plain functions without output."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.backends.holdings import STALE_MAX, StaleItem
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.interruption import DeadlineError
from kvstore.errors import BackendError, ConfigError
from kvstore.types import BlockInfo, NamespaceInfo

_EXPIRED_MAX: Final = 100_000
"""Most expired blocks that one run removes (about 30 MB of memory); the next run continues."""

_REMOVED_AT_ONCE: Final = 5000
"""Expired blocks per removal, between two progress reports; each removal takes locks or lists a directory once."""


def chosen(namespaces: list[NamespaceInfo], wanted: Sequence[str]) -> list[NamespaceInfo]:
    """Return the namespaces whose digests begin with one of the ``wanted`` prefixes; all if there are no prefixes.

    Raises:
        ConfigError: A prefix matches no namespace.
    """
    starts = tuple(text.lower() for text in wanted)
    for text, start in zip(wanted, starts, strict=True):
        if not any(namespace.hex.startswith(start) for namespace in namespaces):
            known = ", ".join(namespace.hex[:16] for namespace in namespaces) or "none"
            raise ConfigError(f"Unknown namespace {text!r}. Known: {known}.")
    return [namespace for namespace in namespaces if not starts or namespace.hex.startswith(starts)]


def summary(medium: Medium, namespace: NamespaceInfo) -> dict[str, Any]:
    """Return a row with the number, bytes and ages (seconds) of a namespace's blocks."""
    blocks, size_bytes, oldest, newest = 0, 0, float("inf"), 0.0
    for block in medium.blocks(namespace):
        blocks += 1
        size_bytes += block.size_bytes
        if block.used_at:
            oldest, newest = min(oldest, block.used_at), max(newest, block.used_at)
    now = time.time()
    return {
        "namespace": namespace.hex,
        "model": namespace.model,
        "blocks": blocks,
        "size_bytes": size_bytes,
        "oldest_s": max(0.0, now - oldest) if newest else None,
        "newest_s": max(0.0, now - newest) if newest else None,
        "unused_s": max(0.0, now - namespace.used_at) if namespace.used_at else None,
        "holder": namespace.holder or None,
    }


@dataclass(slots=True)
class ScrubResult:
    """Result of a scrub."""

    blocks: int = 0  # Blocks read.
    size_bytes: int = 0  # Bytes of their records.
    gone: int = 0  # Blocks that were evicted before they were read.
    faults: list[dict[str, Any]] = field(default_factory=list)  # One row per record that did not verify.
    unread: list[dict[str, Any]] = field(default_factory=list)
    """One row per block that could not be read, with the reason."""
    set_aside: int = 0  # Damaged records taken out of use.
    error: str = ""  # Reason for an early end or a failed removal; empty without one.


def scrub(
    medium: Medium,
    namespaces: Sequence[NamespaceInfo],
    *,
    dry: bool,
    on_block: Callable[[int], None] = lambda size_bytes: None,
    confirm: Callable[[NamespaceInfo, int], bool] = lambda namespace, damaged: True,
) -> ScrubResult:
    """Verify every record at rest, and take damaged ones out of use unless ``dry`` is set.

    Intact records of an unsupported format version are reported and left alone. If the medium fails or the deadline
    passes after a finding, the result is returned with the error.

    Args:
        on_block: Called with the length of each record that was read; may raise DeadlineError.
        confirm: Called with a namespace and the number of its damaged blocks before they are taken out of use; False
            leaves them alone.

    Raises:
        BackendError: The medium failed before the first finding.
        DeadlineError: There was no finding by the deadline.
    """
    result = ScrubResult()
    for namespace in namespaces:
        damaged: list[BlockInfo] = []
        try:
            _verify(medium, namespace, result, damaged, on_block)
        except (BackendError, DeadlineError) as error:
            if not result.faults and not result.unread:
                raise
            result.error = str(error)
            if isinstance(error, DeadlineError):
                break  # No time is left to remove anything.
        try:
            if not dry and damaged and confirm(namespace, len(damaged)):
                result.set_aside += medium.set_aside(namespace, damaged)
        except BackendError as error:
            result.error = result.error or str(error)
        if result.error:
            break
    return result


def _verify(
    medium: Medium,
    namespace: NamespaceInfo,
    result: ScrubResult,
    damaged: list[BlockInfo],
    on_block: Callable[[int], None],
) -> None:
    """Add the findings of a namespace to ``result``, and its damaged blocks to ``damaged``."""
    for record in medium.records(namespace):
        row: dict[str, Any] = {"namespace": namespace.hex, "key": record.block.key.hex()}
        if record.error is not None:
            result.unread.append(row | {"what": str(record.error)})
            continue
        if record.data is None:
            result.gone += 1
            continue
        result.blocks += 1
        result.size_bytes += len(record.data)
        if record.damage is not None:
            what = {"fault": str(record.damage.cause), "damage": record.is_damaged, "what": str(record.damage)}
            result.faults.append(row | what)
            damaged += [record.block] if record.is_damaged else []
        on_block(len(record.data))


@dataclass(slots=True)
class GcPlan:
    """Blocks, namespaces and stale items to remove."""

    stale: list[StaleItem]  # Stale files or objects.
    namespaces: list[NamespaceInfo] = field(default_factory=list)
    """Namespaces to remove whole: without a holder, and not used for the given time."""
    blocks: list[tuple[NamespaceInfo, list[BlockInfo]]] = field(default_factory=list)
    """Expired blocks of other namespaces that are not in use."""
    held: list[NamespaceInfo] = field(default_factory=list)  # Namespaces left alone because an engine uses them.
    more: bool = False  # Whether another run is needed, because a limit of one run was reached.


def make_plan(
    medium: Medium,
    *,
    unused_for_s: float | None,
    expire_s: float | None,
    keep: Sequence[str] = (),
    now: float | None = None,
    expired_max: int = _EXPIRED_MAX,
) -> GcPlan:
    """Decide what to remove; changes nothing. Namespaces and blocks with unknown last use are kept.

    Args:
        unused_for_s: Time since the last use after which a namespace is removed whole; None for never.
        expire_s: Time since the last use after which a block is removed; None for never.
        keep: Digest prefixes of namespaces to keep with all their blocks.
        now: Seconds since the epoch; by default the current time.
        expired_max: Most blocks in one plan.
    """
    now = time.time() if now is None else now
    stale = medium.stale_items()
    plan = GcPlan(stale[:STALE_MAX], more=len(stale) > STALE_MAX)
    room = expired_max
    namespaces = medium.namespaces()
    kept = {namespace.hex for namespace in chosen(namespaces, keep)} if keep else set()
    for namespace in namespaces:
        if namespace.holder:
            plan.held.append(namespace)
        elif namespace.hex in kept:
            continue
        elif unused_for_s is not None and 0 < namespace.used_at <= now - unused_for_s:
            plan.namespaces.append(namespace)
        elif expire_s is not None:
            since = now - expire_s
            expired = (block for block in medium.blocks(namespace) if 0 < block.used_at <= since)
            # One block over the limit shows that another run is needed.
            old = list(itertools.islice(expired, room + 1))
            plan.more = plan.more or len(old) > room
            if old := old[:room]:
                plan.blocks.append((namespace, old))
                room -= len(old)
    return plan


def run_plan(
    medium: Medium,
    plan: GcPlan,
    *,
    on_removed: Callable[[int], None] = lambda count: None,
    batch: int | None = None,
) -> dict[str, int]:
    """Carry out a plan; return the number of removed items by kind.

    ``on_removed`` is called with the number of blocks of each removal. ``batch`` is the most blocks of a removal;
    without it a namespace is removed in one call, which is faster.
    """
    done = {"stale": medium.sweep(plan.stale), "namespaces": 0, "blocks": 0}

    def remove(namespace: NamespaceInfo, blocks: Sequence[BlockInfo] | None) -> None:
        removed = medium.remove(namespace, blocks)
        done["blocks"] += removed
        on_removed(removed)

    for namespace in plan.namespaces:
        if batch is not None:
            for blocks in _batches(list(medium.blocks(namespace)), batch):
                remove(namespace, blocks)
        remove(namespace, None)
    if plan.namespaces:
        left = {namespace.hex for namespace in medium.namespaces()}
        done["namespaces"] = sum(namespace.hex not in left for namespace in plan.namespaces)
    for namespace, expired in plan.blocks:
        for blocks in _batches(expired, batch or _REMOVED_AT_ONCE):
            remove(namespace, blocks)
    return done


def _batches(blocks: Sequence[BlockInfo], size: int) -> Iterator[Sequence[BlockInfo]]:
    for start in range(0, len(blocks), size):
        yield blocks[start : start + size]
