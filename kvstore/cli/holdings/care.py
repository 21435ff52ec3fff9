"""Looking after what lies on the medium of a tier: inspect, scrub, gc, export, import. Plain functions, no output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

from kvstore.backends.base import Backend, RecordGeometry, RecordWrite
from kvstore.backends.disk.config import DiskConfig
from kvstore.cli.holdings.archive import ArchivedBlock, ArchiveError, aligned_to, read_archive
from kvstore.cli.holdings.base import LITTER_MAX, HeldBlock, HeldNamespace, Holdings, Litter
from kvstore.cli.holdings.scrubbing import ScrubResult, scrub
from kvstore.cli.tier_argument import TierArgument
from kvstore.errors import ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.registry import BACKENDS
from kvstore.types import BlockKey, Outcome

__all__ = [
    "GcPlan",
    "ImportResult",
    "ScrubResult",
    "chosen",
    "import_archive",
    "make_plan",
    "open_holdings",
    "run_plan",
    "scrub",
    "summary",
]

_PUT_BYTES: Final = 64 << 20
"""Records of an import that are in memory at once: fills a medium's queue, and is little beside an engine."""

_FAILED_MAX: Final = 1000
"""Blocks of an import that failed and are named: more say nothing new."""

_EXPIRED_MAX: Final = 100_000
"""Expired blocks that one run takes, some 30 MB of memory; the next run goes on."""

_KINDS: Final = {
    "file": "kvstore.cli.holdings.disk:DiskHoldings",
    "nvme": "kvstore.cli.holdings.disk:DiskHoldings",
    "redis": "kvstore.cli.holdings.redis:RedisHoldings",
    "s3": "kvstore.cli.holdings.s3:S3Holdings",
}
"""What opens the holdings of a backend's tier: a class that is called with the tier's configuration. It is imported
when asked for, as the packages that servers need are not everybody's."""


def open_holdings(argument: TierArgument) -> Holdings:
    """Open what lies on a tier's medium.

    Raises:
        ConfigError: There is no such tier, or its medium can't be looked at from outside.
        LockedError: An engine has it for itself alone.
    """
    known = _KINDS.get(argument.backend)
    if known is None:
        kinds = ", ".join(sorted(_KINDS))
        raise ConfigError(f"What a {argument.backend} tier holds can't be listed. Expected a tier of: {kinds}.")
    holdings: Holdings = pkgutil.resolve_name(known)(argument.config)
    return holdings


def chosen(holdings: Holdings, wanted: Sequence[str]) -> list[HeldNamespace]:
    """Return the namespaces whose digests begin with one of some texts; all of them if there are none.

    Raises:
        ConfigError: A text fits no namespace.
    """
    return _beginning(holdings.namespaces(), wanted)


def _beginning(namespaces: list[HeldNamespace], wanted: Sequence[str]) -> list[HeldNamespace]:
    for text in wanted:
        if not any(namespace.hex.startswith(text.lower()) for namespace in namespaces):
            known = ", ".join(namespace.hex[:16] for namespace in namespaces) or "none"
            raise ConfigError(f"There is no namespace {text!r} here. There are: {known}.")
    starts = tuple(text.lower() for text in wanted)
    return [namespace for namespace in namespaces if not starts or namespace.hex.startswith(starts)]


def summary(holdings: Holdings, namespace: HeldNamespace) -> dict[str, Any]:
    """Count the blocks of a namespace: a row with their number, bytes and ages (seconds)."""
    blocks, size_bytes, oldest, newest = 0, 0, float("inf"), 0.0
    for block in holdings.blocks(namespace):
        blocks += 1
        size_bytes += block.size_bytes
        if block.used_at:
            oldest, newest = min(oldest, block.used_at), max(newest, block.used_at)
    now = time.time()
    fields = namespace.fields or {}
    return {
        "namespace": namespace.hex,
        "model": next((str(fields[name]) for name in ("model", "model_name") if fields.get(name)), None),
        "blocks": blocks,
        "size_bytes": size_bytes,
        "oldest_s": max(0.0, now - oldest) if newest else None,
        "newest_s": max(0.0, now - newest) if newest else None,
        "unused_s": max(0.0, now - namespace.used_at) if namespace.used_at else None,
        "holder": namespace.holder or None,
    }


@dataclass(slots=True)
class GcPlan:
    """What is to go.

    Attributes:
        litter: What dead writers left.
        namespaces: Namespaces that nobody holds or has used for long, whole.
        blocks: Blocks that nobody has used for long, of namespaces that stay and that nobody holds.
        held: Namespaces that were left alone because somebody holds them.
        more: Whether more litter or blocks have to go than one run takes.
    """

    litter: list[Litter]
    namespaces: list[HeldNamespace] = field(default_factory=list)
    blocks: list[tuple[HeldNamespace, list[HeldBlock]]] = field(default_factory=list)
    held: list[HeldNamespace] = field(default_factory=list)
    more: bool = False


def make_plan(
    holdings: Holdings,
    *,
    unused_for_s: float | None,
    expire_s: float | None,
    keep: Sequence[str] = (),
    now: float | None = None,
    expired_max: int = _EXPIRED_MAX,
) -> GcPlan:
    """Decide what is to go; changes nothing. What nobody knows the last use of stays.

    Args:
        holdings: What lies there.
        unused_for_s: Namespaces unused for so long go whole; None: none do.
        expire_s: Blocks unused for so long go; None: none do.
        keep: Beginnings of the digests of namespaces that stay, with all their blocks.
        now: Seconds since the epoch; by default the time.
        expired_max: Blocks that one plan may have.
    """
    now = time.time() if now is None else now
    litter = holdings.litter()
    plan = GcPlan(litter[:LITTER_MAX], more=len(litter) > LITTER_MAX)
    room = expired_max
    namespaces = holdings.namespaces()
    kept = {namespace.hex for namespace in _beginning(namespaces, keep)} if keep else set()
    for namespace in namespaces:
        if namespace.holder:
            plan.held.append(namespace)
        elif namespace.hex in kept:
            continue
        elif unused_for_s is not None and 0 < namespace.used_at <= now - unused_for_s:
            plan.namespaces.append(namespace)
        elif expire_s is not None:
            # One more than there is room for tells whether a further run finds anything.
            old = _unused_blocks(holdings, namespace, now - expire_s, room + 1)
            plan.more = plan.more or len(old) > room
            if old := old[:room]:
                plan.blocks.append((namespace, old))
                room -= len(old)
    return plan


def _unused_blocks(holdings: Holdings, namespace: HeldNamespace, since: float, count: int) -> list[HeldBlock]:
    """Return the first blocks that were not used since a moment."""
    return list(itertools.islice((each for each in holdings.blocks(namespace) if 0 < each.used_at <= since), count))


def run_plan(holdings: Holdings, plan: GcPlan) -> dict[str, int]:
    """Do what a plan says; return how much of it was done, by what."""
    done = {"litter": holdings.sweep(plan.litter), "namespaces": 0, "blocks": 0}
    for namespace in plan.namespaces:
        done["blocks"] += holdings.remove(namespace, None)
    if plan.namespaces:
        left = {namespace.hex for namespace in holdings.namespaces()}
        done["namespaces"] = sum(namespace.hex not in left for namespace in plan.namespaces)
    for namespace, blocks in plan.blocks:
        done["blocks"] += holdings.remove(namespace, blocks)
    return done


@dataclass(slots=True)
class ImportResult:
    """What was taken in.

    Attributes:
        outcomes: Blocks by what became of them.
        size_bytes: Bytes of the records that were put.
        damaged: One row per record that did not verify.
        failed: One row per block that the tier did not take, the first thousand of them.
        is_whole: Whether the archive came to its end.
        error: What the medium said last, if blocks failed.
    """

    outcomes: dict[str, int] = field(default_factory=dict)
    size_bytes: int = 0
    damaged: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    is_whole: bool = True
    error: str = ""

    def add(self, outcome: str, count: int = 1) -> None:
        """Count blocks."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count

    def name(self, namespace: HeldNamespace, key: BlockKey, what: str) -> None:
        """Name a block that is not in the tier now, and say why."""
        if len(self.failed) < _FAILED_MAX:
            self.failed.append({"namespace": namespace.hex, "key": key.hex(), "what": what})


def import_archive(
    argument: TierArgument, file: IO[bytes], *, dry: bool, on_block: Callable[[], None] | None = None
) -> ImportResult:
    """Put the blocks of an archive into a tier, by the way that an engine does; blocks that are there stay.

    However it ends, a block is in the tier whole or not at all.

    Raises:
        ConfigError: The tier can't be used.
        LockedError: An engine that does not share it has the namespace, or the medium.
        BackendError: The medium refuses.
        ArchiveError: The file is no archive. (One that was cut off is taken in as far as it goes.)
    """
    result = ImportResult()

    def on_damage(namespace: HeldNamespace, key: BlockKey, error: RecordError) -> None:
        row = {"namespace": namespace.hex, "key": key.hex(), "fault": str(error.cause), "what": str(error)}
        result.damaged.append(row)

    blocks = read_archive(file, on_damage)
    first = next(blocks, None)
    # From here on it is an archive; that it is cut off shows at its end.
    source = _noting_the_end(first, blocks, result, on_block)
    if dry:
        for block in source:
            result.add("intact")
            result.size_bytes += len(block.record)
        return result
    if argument.backend == "memory":
        raise ConfigError("A memory tier holds nothing that outlives this command. Give another tier.")
    asyncio.run(_put_all(argument, source, result))
    return result


def _noting_the_end(
    first: ArchivedBlock | None,
    rest: Iterator[ArchivedBlock],
    result: ImportResult,
    on_block: Callable[[], None] | None,
) -> Iterator[ArchivedBlock]:
    if first is None:
        return
    try:
        for block in itertools.chain((first,), rest):
            yield block
            if on_block is not None:
                on_block()
    except ArchiveError as error:
        result.is_whole = False
        result.error = str(error)


async def _put_all(argument: TierArgument, blocks: Iterator[ArchivedBlock], result: ImportResult) -> None:
    """Put blocks in batches; an archive has the namespaces one after the other."""
    backend: Backend | None = None
    current = ""
    batch: list[ArchivedBlock] = []
    batch_bytes = 0
    try:
        # Reading blocks the loop, on which nothing else runs.
        for block in blocks:
            if block.namespace.hex != current:
                if backend is not None:
                    await _put(backend, batch, result)
                    await backend.close()
                    batch, batch_bytes = [], 0
                backend, current = await _opened(argument, block), block.namespace.hex
            batch.append(block)
            batch_bytes += len(block.record)
            if backend is not None and batch_bytes >= _PUT_BYTES:
                await _put(backend, batch, result)
                batch, batch_bytes = [], 0
        if backend is not None:
            await _put(backend, batch, result)
    finally:
        if backend is not None:
            await backend.close()


async def _opened(argument: TierArgument, block: ArchivedBlock) -> Backend:
    namespace = Namespace.of_digest(bytes.fromhex(block.namespace.hex))
    if block.namespace.fields is not None:
        with contextlib.suppress(ConfigError):
            stated = Namespace(block.namespace.fields)
            namespace = stated if stated == namespace else namespace
    payload_bytes_max = block.header.plain_bytes
    if argument.backend == "s3":
        # Housekeeping is for engines: if this one were elected, they would wait for long after it has gone.
        argument = argument.with_options(capacity=0, ttl=0, snapshot=False)
    backend: Backend = BACKENDS.find(argument.backend)(argument.config)
    try:
        await backend.open(namespace, RecordGeometry(backend.alignment, payload_bytes_max))
        if isinstance(argument.config, DiskConfig):
            # What the journal does not tell is known after the scan; until then a block might be stored twice.
            async for _ in backend.scan_keys():
                continue
    except BaseException:
        await backend.close()
        raise
    return backend


async def _put(backend: Backend, blocks: Sequence[ArchivedBlock], result: ImportResult) -> None:
    writes: list[RecordWrite] = []
    for block in blocks:
        buffers = aligned_to(block, backend.alignment)
        if buffers is None:
            result.add("sealed")
            result.name(block.namespace, block.key, "sealed for a medium of another alignment")
        else:
            writes.append(RecordWrite(block.key, buffers))
    if not writes:
        return
    for write, outcome in zip(writes, await backend.put(writes), strict=True):
        result.add(outcome.name.lower())
        if outcome is Outcome.OK:
            result.size_bytes += write.size_bytes
        elif not outcome.ok:
            result.name(blocks[0].namespace, write.key, outcome.name.lower())
            result.error = backend.last_error or result.error
