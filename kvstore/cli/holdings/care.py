"""Scrub, gc and import for the medium of any backend, as plain functions without output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

from kvstore.backends.base import Backend, RecordWrite
from kvstore.backends.groups import grouped
from kvstore.backends.holdings import STALE_MAX, StaleItem, open_holdings
from kvstore.cli.holdings.archive import ArchivedBlock, ArchiveError, aligned_to, read_archive
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.interruption import DeadlineError, run_interruptibly
from kvstore.cli.tier_argument import TierArgument
from kvstore.errors import BackendError, ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, NamespaceInfo, Outcome

_PUT_BYTES: Final = 64 << 20
"""Bytes per batch of an import: fills a medium's queue, and is little memory compared with an engine's."""

_PUT_BLOCKS: Final = 1 << 16
"""Most records per batch of an import."""

_FAILED_MAX: Final = 1000
"""Most failed blocks that an import lists."""

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


@dataclass(slots=True)
class ImportResult:
    """Result of an import."""

    outcomes: dict[str, int] = field(default_factory=dict)  # Number of blocks by outcome.
    size_bytes: int = 0  # Bytes of the records that were stored.
    damaged: list[dict[str, Any]] = field(default_factory=list)  # One row per record that did not verify.
    failed: list[dict[str, Any]] = field(default_factory=list)
    """One row per block that was not stored, the first thousand of them."""
    is_whole: bool = True  # Whether the archive was complete.
    error: str = ""  # Last failure of the medium, if blocks failed.

    def add(self, outcome: str) -> None:
        """Count a block."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def add_failed(self, namespace: NamespaceInfo, key: BlockKey, what: str) -> None:
        """Add a block that was not stored to the list, if it has room."""
        if len(self.failed) < _FAILED_MAX:
            self.failed.append({"namespace": namespace.hex, "key": key.hex(), "what": what})


def import_archive(
    tier: TierArgument, file: IO[bytes], *, dry: bool, on_block: Callable[[int], None] = lambda size_bytes: None
) -> ImportResult:
    """Store the blocks of an archive in a tier, as an engine does; existing blocks stay.

    A block is stored whole or not at all, even if the import is interrupted.

    Raises:
        ConfigError: The tier cannot be used.
        LockedError: An engine has exclusive use of the namespace or the medium.
        BackendError: The medium fails.
        ArchiveError: The file is not an archive. (A truncated one is read up to its end.)
    """
    result = ImportResult()

    def on_damage(namespace: NamespaceInfo, key: BlockKey, error: RecordError) -> None:
        row = {"namespace": namespace.hex, "key": key.hex(), "fault": str(error.cause), "what": str(error)}
        result.damaged.append(row)

    blocks = read_archive(file, on_damage)
    first = list(itertools.islice(blocks, 1))  # Raises for an invalid archive before the tier is opened.

    def source() -> Iterator[ArchivedBlock]:
        try:
            for block in itertools.chain(first, blocks):
                yield block
                on_block(block.size_bytes)
        except ArchiveError as error:
            result.is_whole = False
            result.error = str(error)

    if dry:
        for block in source():
            result.add("intact")
            result.size_bytes += block.size_bytes
        return result
    if tier.backend == "memory" and not tier.options.get("shelf"):
        raise ConfigError("A memory tier without 'shelf' loses its blocks when this command ends. Give another tier.")
    holdings = open_holdings(tier.backend, tier.config)
    with asyncio.Runner() as runner:
        # The blocks of a namespace are consecutive.
        for _, of_namespace in itertools.groupby(source(), key=lambda block: block.namespace.hex):
            backend: Backend | None = None
            try:
                for batch in grouped(of_namespace, _PUT_BLOCKS, _PUT_BYTES):
                    if backend is None:
                        writer = holdings.writer(_namespace_of(batch[0]), batch[0].header.plain_bytes)
                        backend = run_interruptibly(runner, writer)
                    run_interruptibly(runner, _put(backend, batch, result))
            finally:
                if backend is not None:
                    run_interruptibly(runner, backend.close())
    return result


def _namespace_of(block: ArchivedBlock) -> Namespace:
    """Return the namespace of a block, with the archived fields if they match its digest."""
    namespace = Namespace.of_digest(bytes.fromhex(block.namespace.hex))
    if block.namespace.fields is not None:
        with contextlib.suppress(ConfigError):
            stated = Namespace(block.namespace.fields)
            return stated if stated == namespace else namespace
    return namespace


async def _put(backend: Backend, blocks: Sequence[ArchivedBlock], result: ImportResult) -> None:
    writes: list[RecordWrite] = []
    for block in blocks:
        buffers = aligned_to(block, backend.alignment)
        if buffers is None:
            result.add("sealed")
            result.add_failed(block.namespace, block.key, "sealed for a medium of another alignment")
        else:
            writes.append(RecordWrite(block.key, buffers))
    for write, outcome in zip(writes, await backend.put(writes) if writes else (), strict=True):
        result.add(outcome.name.lower())
        if outcome is Outcome.OK:
            result.size_bytes += write.size_bytes
        elif not outcome.ok:
            result.add_failed(blocks[0].namespace, write.key, outcome.name.lower())
            result.error = backend.last_error or result.error
