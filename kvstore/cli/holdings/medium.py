"""Synchronous access to a tier's medium: runs a backend's holdings on an event loop, and verifies records."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from kvstore.backends.groups import grouped
from kvstore.backends.holdings import StaleItem, open_holdings
from kvstore.cli.interruption import run_interruptibly
from kvstore.cli.tier_argument import TierArgument
from kvstore.codec.record import RecordCodec, RecordFault, decode_header
from kvstore.errors import BackendError, ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, NamespaceInfo, RemovalCause

_T = TypeVar("_T")

_BATCH_BLOCKS: Final = 32
"""Most blocks read concurrently: enough to hide a server's latency, few enough to leave capacity to engines."""

_BATCH_BYTES: Final = 64 << 20
"""Most bytes read concurrently, unless one block is longer: bounds a command's memory."""

_FAILURES_MAX: Final = 16
"""Consecutive unreadable blocks after which the medium counts as failed."""

_PLAIN_BYTES_MAX: Final = 1 << 32
"""Longest block that a header may claim."""


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """Result of reading and verifying one block: intact, damaged, unreadable, or (if nothing is set) gone."""

    block: BlockInfo
    data: memoryview | None = None  # The whole record, valid until the next one is read.
    damage: RecordError | None = None  # Reason for a failed verification.
    error: BackendError | None = None  # Reason for a failed read.

    @property
    def is_damaged(self) -> bool:
        """Whether the record is useless: broken, or misplaced because it is of another namespace.

        False for an intact record of an unsupported format.
        """
        cause = None if self.damage is None else RecordFault(self.damage.cause)
        return cause is not None and (cause.is_damage or cause is RecordFault.NAMESPACE)


class Medium:
    """The blocks on a tier's medium. Its event loop runs only within calls, so it cannot be used within a running loop.

    ``named``: digests given by the user, which serve as the list of namespaces if the backend cannot list them.

    Raises:
        ConfigError: The tier does not exist, or its medium cannot be read from outside.
        BackendError: The medium cannot be reached.
    """

    def __init__(self, tier: TierArgument, named: Sequence[str] = ()) -> None:
        self.tier = tier
        self._named = [name.lower() for name in named]
        self._holdings = open_holdings(tier.backend, tier.config)
        self.ttl_s, self.knows_holders = self._holdings.ttl_s, self._holdings.knows_holders
        self._runner = asyncio.Runner()
        self._is_closed = False
        try:
            self._run(self._holdings.open())
        except BaseException:
            self.close()
            raise

    def namespaces(self) -> list[NamespaceInfo]:
        """Return all namespaces, the most recently used first."""
        return self._listed(self._run(self._holdings.namespaces()))

    def described(self) -> list[NamespaceInfo]:
        """Return the namespaces with stored fields in the same order, if possible without listing blocks."""
        return self._listed(self._run(self._holdings.described()))

    def present(self, namespace: NamespaceInfo, keys: Collection[BlockKey]) -> set[BlockKey]:
        """Return which of these blocks are on the medium.

        Raises:
            BackendError: The medium did not answer for all of them.
        """
        return self._run(self._holdings.present(namespace, keys))

    def blocks(self, namespace: NamespaceInfo) -> Iterator[BlockInfo]:
        """Yield the blocks of a namespace.

        Raises:
            BackendError: The medium failed. If it failed only for some blocks, all others are yielded first.
        """
        failure: BackendError | None = None
        for block in self._scanned(namespace):
            if block.fault is None:
                yield block
            elif isinstance(block.fault, BackendError):
                failure = failure or block.fault
        if failure is not None:
            raise failure

    def records(self, namespace: NamespaceInfo) -> Iterator[HeldRecord]:
        """Read and verify the blocks of a namespace, in the order of the scan.

        Raises:
            BackendError: The medium no longer answers.
        """
        failures = 0
        for batch in grouped(self._scanned(namespace), _BATCH_BLOCKS, _BATCH_BYTES):
            for record in self.read(namespace, batch):
                failures = 0 if record.error is None else failures + 1
                if record.error is not None and failures >= _FAILURES_MAX:
                    raise record.error
                yield record

    def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Iterator[HeldRecord]:
        """Read and verify some blocks concurrently."""
        longest = self._holdings.record_bytes_max
        readable = [block for block in blocks if block.fault is None and block.size_bytes <= longest]
        results = iter(self._run(self._holdings.read(namespace, readable)) if readable else ())
        for block in blocks:
            if block.fault is not None:
                yield self._checked(namespace, block, block.fault)
            elif block.size_bytes > longest:
                text = f"{block.size_bytes} bytes, longer than any block (at most {longest})."
                yield HeldRecord(block, error=BackendError(text, backend=self.tier.backend))
            else:
                yield self._checked(namespace, block, next(results))

    def set_aside(self, namespace: NamespaceInfo, blocks: Iterable[BlockInfo]) -> int:
        """Read damaged blocks again and take those still damaged out of use; return their number."""
        count = 0
        for batch in grouped(blocks, _BATCH_BLOCKS, _BATCH_BYTES):
            results = self._run(self._holdings.read(namespace, batch))
            again = [self._checked(namespace, *each) for each in zip(batch, results, strict=True)]
            if (failure := next((record.error for record in again if record.error is not None), None)) is not None:
                raise failure
            damaged = [record.block for record in again if record.is_damaged]
            count += self._run(self._holdings.remove(namespace, damaged, RemovalCause.CORRUPT)) if damaged else 0
        return count

    def remove(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo] | None) -> int:
        """Remove blocks, or with None the whole namespace, unless an engine uses it; return the number removed."""
        if blocks is None:
            return self._run(self._holdings.remove_namespace(namespace))
        return self._run(self._holdings.remove(namespace, blocks, RemovalCause.EXPIRED)) if blocks else 0

    def stale_items(self) -> list[StaleItem]:
        """Return stale files or objects."""
        return self._run(self._holdings.stale_items())

    def sweep(self, stale: Sequence[StaleItem]) -> int:
        """Remove stale files or objects; return the number removed."""
        return self._run(self._holdings.sweep(stale)) if stale else 0

    def close(self) -> None:
        """Close all connections and files. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._run(self._holdings.close())
            finally:
                self._runner.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return run_interruptibly(self._runner, work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _listed(self, found: list[NamespaceInfo] | None) -> list[NamespaceInfo]:
        if found is not None:
            return sorted(found, key=lambda namespace: -namespace.used_at)
        if not self._named or any(not re.fullmatch("[0-9a-f]{64}", name) for name in self._named):
            raise ConfigError(
                f"The backend {self.tier.backend!r} cannot list namespaces. Give --namespace with the whole digest, "
                "which the engine logs when it opens the tier."
            )
        return [NamespaceInfo(name) for name in self._named]

    def _scanned(self, namespace: NamespaceInfo) -> Iterator[BlockInfo]:
        pages = self._holdings.scan(namespace)

        async def next_page() -> Sequence[BlockInfo] | None:
            return await anext(pages, None)

        try:
            while (page := self._run(next_page())) is not None:
                yield from page
        finally:
            if not self._is_closed:
                self._run(pages.aclose())

    def _checked(self, namespace: NamespaceInfo, block: BlockInfo, result: object) -> HeldRecord:
        if isinstance(result, RecordError):
            return HeldRecord(block, memoryview(b""), damage=result)
        if isinstance(result, BackendError):
            return HeldRecord(block, error=result)
        if not isinstance(result, memoryview):
            return HeldRecord(block)
        try:
            _check_record(result, namespace.hex, block.key, alignment=self._holdings.header_bytes)
        except RecordError as error:
            return HeldRecord(block, result, damage=error)
        return HeldRecord(block, result)


def _check_record(record: memoryview, namespace: str, key: BlockKey, *, alignment: int) -> None:
    """Check a record as far as possible without the writer's keys and codecs.

    ``namespace`` is a digest in hexadecimal, ``alignment`` the unit of a record's length on the medium.

    Raises:
        RecordError: The record is incomplete, damaged, or of another namespace or key.
    """
    found = decode_header(record[:256])
    if found.header_bytes % 256 or found.header_bytes < 256 or found.header_bytes > len(record):
        raise RecordError(f"The record ends within its header of {found.header_bytes} bytes.", RecordFault.LENGTH)
    if found.plain_bytes > _PLAIN_BYTES_MAX:
        raise RecordError(
            f"The record claims a block of {found.plain_bytes} bytes. Expected at most {_PLAIN_BYTES_MAX}.",
            RecordFault.GEOMETRY,
        )
    codec = RecordCodec(
        Namespace.of_digest(bytes.fromhex(namespace)), header_bytes=found.header_bytes, alignment=alignment
    )
    header, payload = record[: found.header_bytes], record[found.header_bytes :]
    # Every codec and seal is accepted, because the stored payload is checked.
    codec.check(key, header, payload, len(record), lambda header: "", decodes=False)
