"""Holdings on a server: asked by coroutines on a loop of their own, so that some requests run at once."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from kvstore.backends.groups import grouped
from kvstore.cli.holdings.base import HeldBlock, HeldNamespace, HeldRecord, Holdings
from kvstore.errors import BackendError

__all__ = ["RemoteHoldings"]

_T = TypeVar("_T")

_BATCH_BLOCKS: Final = 32
"""Blocks that are read at once: hides a server's latency, and leaves it free for engines."""

_BATCH_BYTES: Final = 64 << 20
"""Most bytes of them, unless a single block is longer: what a command takes of memory."""

_FAILURES_MAX: Final = 16
"""Blocks one after the other that can't be read: then it is the server that fails, and not they."""


class RemoteHoldings(Holdings):
    """What lies on a server, for whoever is not a coroutine.

    A backend writes the coroutines ``_pages``, ``_read_batch`` and ``_disconnect``, and runs others by ``_run``. The
    loop runs only within these calls; between them nothing happens. Not for use within a running loop.
    """

    knows_holders = False

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._is_closed = False

    @abstractmethod
    def _pages(self, namespace: HeldNamespace) -> AsyncGenerator[Sequence[HeldBlock], None]:
        """Yield the blocks of a namespace, some hundred or thousand at once; never all in memory."""

    @abstractmethod
    async def _read_batch(
        self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]
    ) -> Sequence[memoryview | BackendError | None]:
        """Return the whole record of each block; None for one that has gone, the failure for one that can't be read."""

    def blocks(self, namespace: HeldNamespace) -> Iterator[HeldBlock]:
        """See :meth:`Holdings.blocks`."""
        pages = self._pages(namespace)
        try:
            while (page := self._run(_next_of(pages))) is not None:
                yield from page
        finally:
            if not self._is_closed:
                self._run(pages.aclose())

    def read(self, namespace: HeldNamespace, block: HeldBlock) -> memoryview | None:
        """See :meth:`Holdings.read`.

        Raises:
            BackendError: It can't be read.
        """
        (found,) = self._run(self._read_batch(namespace, [block]))
        if isinstance(found, BackendError):
            raise found
        return found

    def records(self, namespace: HeldNamespace) -> Iterator[HeldRecord]:
        """See :meth:`Holdings.records`."""
        yield from self._records_of(self.blocks(namespace), namespace)

    def _records_of(self, blocks: Iterable[HeldBlock], namespace: HeldNamespace) -> Iterator[HeldRecord]:
        failures = 0
        for batch in grouped(blocks, _BATCH_BLOCKS, _BATCH_BYTES):
            for block, found in zip(batch, self._run(self._read_batch(namespace, batch)), strict=True):
                if not isinstance(found, BackendError):
                    failures = 0
                    yield HeldRecord(block, found)
                    continue
                failures += 1
                if failures >= _FAILURES_MAX:
                    raise found
                yield HeldRecord(block, None, str(found))

    def close(self) -> None:
        """See :meth:`Holdings.close`."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._runner.run(self._disconnect())
            finally:
                self._runner.close()

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close connections. Called once."""

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end; Ctrl-C cancels it first."""
        return self._runner.run(work)


async def _next_of(pages: AsyncGenerator[Sequence[HeldBlock], None]) -> Sequence[HeldBlock] | None:
    return await anext(pages, None)
