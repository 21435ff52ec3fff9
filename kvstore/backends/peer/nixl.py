"""NIXL: reads payloads of lent rows from a peer's memory, by RDMA if UCX finds it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple

from kvstore.codec.rows import address_of
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.runtime.buffers import BufferPool

__all__ = ["NixlError", "NixlReader", "RemoteRow", "SharedMemory"]

_PACKAGES: Final = ("nixl", "nixl_cu13", "nixl_cu12")
"""Names under which NIXL is published; each has the same interface, and moves CPU memory without a GPU."""

_BUFFERS_BYTES: Final = 64 << 20
_BUFFERS_MIN: Final = 8
"""Memory of the buffers for reads, and the least number of buffers, whatever the length of blocks."""

_READS_MAX: Final = 4
"""Concurrent reads, each on a thread, because calls of NIXL may take long when a peer is gone."""

_POLL_S: Final = 100e-6
_POLL_S_MAX: Final = 1e-3
"""Pause between two checks of a read's state; it doubles each time."""

_PROGRESS_US: Final = 1000
"""Polling pause of an idle agent's thread; arrivals wake the thread."""

_COPIED_BYTES: Final = 4 << 20
"""Bytes copied before the loop continues with other tasks."""

_PEERS_MAX: Final = 256
"""Most connected peers; the one connected first is disconnected first."""

_left_behind: list[object] = []
"""Agents and buffers of reads that had not ended when their tier was closed; kept until the process ends."""


class NixlError(Exception):
    """A read failed. If it is still running, its buffers stay reserved until it ends."""


class RemoteRow(NamedTuple):
    """A row in a peer's memory, and the buffers for its bytes."""

    address: int
    targets: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Length of the row."""
        return sum([target.nbytes for target in self.targets])


class SharedMemory:
    """Memory that peers may read by NIXL, until :meth:`close`.

    Args:
        memory: One C-contiguous buffer. It is pinned (page-locked) where the transport is RDMA.

    Attributes:
        metadata: NIXL metadata with which a peer reaches this memory.

    Raises:
        ConfigError: NIXL is not installed.
        BackendUnavailableError: NIXL can't share this memory.
    """

    def __init__(self, memory: memoryview) -> None:
        self._begin, self._length = address_of(memory), memory.nbytes
        self._agent: Any = _agent()
        try:
            self._agent.register_memory([(self._begin, self._length, 0, "")], "DRAM")
            self.metadata = bytes(self._agent.get_agent_metadata())
        except Exception as error:  # One for each status of NIXL.
            raise BackendUnavailableError(f"NIXL can't share the primary tier: {error}", backend="peer") from error

    def address_of(self, row: memoryview) -> int | None:
        """Return the address of a row; None if the row is outside this memory, or empty."""
        if not row.nbytes:
            return None
        address = address_of(row)
        return address if self._begin <= address <= self._begin + self._length - row.nbytes else None

    def close(self) -> None:
        """End all access, before the memory is unmapped."""
        self._agent = None  # Ends its registrations, connections and thread.


class NixlReader:
    """Reads rows of peers.

    A read that does not end in time can't be cancelled: the network may still write. Reads therefore use buffers of our
    own, whose content is then copied to the slots. The buffers of a late read are reused once it has ended.

    Args:
        row_bytes: Length of the longest row.

    Attributes:
        rows_max: Most rows of one read.

    Raises:
        ConfigError: NIXL is not installed.
        BackendUnavailableError: NIXL does not work here.
    """

    def __init__(self, row_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = BufferPool(row_bytes, max(_BUFFERS_MIN, _BUFFERS_BYTES // row_bytes))
        self.rows_max = self._pool.count // _READS_MAX
        self._agent: Any = _agent()
        try:
            self._agent.register_memory([(self._pool.address, row_bytes * self._pool.count, 0, "")], "DRAM")
        except Exception as error:  # One for each status of NIXL.
            raise BackendUnavailableError(f"NIXL can't register memory: {error}", backend="peer") from error
        self._threads = ThreadPoolExecutor(_READS_MAX, thread_name_prefix="kvstore-nixl")
        self._peers: dict[bytes, Any] = {}
        self._unended: list[Any] = []
        self._closed = False

    async def read(self, metadata: bytes, rows: Sequence[RemoteRow], limit_s: float) -> None:
        """Read at most ``rows_max`` rows of the peer with this metadata. No target is touched after the call.

        Raises:
            NixlError: The read failed or took too long.
        """
        ends_at = self._loop.time() + limit_s
        try:
            async with asyncio.timeout_at(ends_at):
                buffers = await self._pool.take(len(rows))
        except TimeoutError:
            raise NixlError(f"earlier reads have all buffers for {limit_s:.1f} s") from None
        pairs = [(row.address, address_of(buffer), row.nbytes) for row, buffer in zip(rows, buffers, strict=True)]
        read = self._loop.run_in_executor(self._threads, self._read, metadata, pairs, time.monotonic() + limit_s)
        try:
            await asyncio.wait({read}, timeout=ends_at - self._loop.time())
            if not read.done():
                raise NixlError(f"a read did not end within {limit_s:.1f} s")
            if (error := read.exception()) is not None:
                # A new exception: the traceback of the old one would form a cycle that keeps the targets alive.
                raise NixlError(str(error)) from None
            copied = 0
            for row, buffer in zip(rows, buffers, strict=True):
                at = 0
                for target in row.targets:
                    target[:] = buffer[at : at + target.nbytes]
                    at += target.nbytes
                copied += at
                if copied >= _COPIED_BYTES:
                    copied = 0
                    await asyncio.sleep(0)
        finally:
            if read.done():
                self._pool.give_back(buffers)
            else:
                read.add_done_callback(lambda _: self._pool.give_back(buffers))

    def stop(self) -> None:
        """Make all reads fail."""
        self._closed = True

    def close(self) -> None:
        """Release everything; only after :meth:`stop`, and when no call is running."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._unended or self._pool.free_count < self._pool.count:
            _left_behind.append((self._agent, self._pool, self._unended))
        else:
            self._agent = None
            self._pool.close()

    def _read(self, metadata: bytes, pairs: Sequence[tuple[int, int, int]], ends_at: float) -> None:
        """Read on this thread; return only when NIXL no longer touches the buffers, or when the tier is closed."""
        if self._closed or time.monotonic() > ends_at:
            raise NixlError("a read came too late to begin")
        agent = self._agent
        try:
            peer = self._peer(metadata)
            ours = agent.get_xfer_descs([(local, length, 0) for _, local, length in pairs], "DRAM")
            theirs = agent.get_xfer_descs([(remote, length, 0) for remote, _, length in pairs], "DRAM")
            read = agent.initialize_xfer("READ", ours, theirs, peer)
            state, pause_s = agent.transfer(read), _POLL_S
            while state == "PROC":
                if self._closed:
                    self._unended.append(read)
                    raise NixlError("the tier is closed")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S_MAX)
                state = agent.check_xfer_state(read)
            read.release()
        except NixlError:
            raise
        except Exception as error:  # One for each status of NIXL.
            self._forget(metadata)
            raise NixlError(str(error) or type(error).__name__) from None
        if state != "DONE":
            self._forget(metadata)
            raise NixlError(f"a read ended as {state}")

    def _peer(self, metadata: bytes) -> Any:
        peer = self._peers.get(metadata)
        if peer is None:
            peer = self._peers[metadata] = self._agent.add_remote_agent(metadata)
            while len(self._peers) > _PEERS_MAX:
                self._forget(next(iter(self._peers)))
        return peer

    def _forget(self, metadata: bytes) -> None:
        """Disconnect; the next read connects again."""
        with suppress(Exception):
            self._agent.remove_remote_agent(self._peers.pop(metadata))


def _agent() -> Any:
    package = next((name for name in _PACKAGES if importlib.util.find_spec(name)), None)
    if package is None:
        raise ConfigError("'transport' is 'nixl', which is not installed. Run: pip install nixl")
    name = f"kvstore-{secrets.token_hex(8)}"
    try:
        api = importlib.import_module(f"{package}._api")
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        # In the agent that NIXL's Python interface creates, an idle thread spins and occupies a core.
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _PROGRESS_US
        config.syncMode = api.nixlBind.NIXL_THREAD_SYNC_STRICT  # Threads of ours share the agent.
        agent.agent = api.nixlBind.nixlAgent(name, config)
        agent.create_backend("UCX")
    except Exception as error:  # NIXL has an exception for each status, and no base for them.
        raise BackendUnavailableError(f"NIXL does not work here: {error}", backend="peer") from error
    return agent
