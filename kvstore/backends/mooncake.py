"""Mooncake Store: a pool of memory that many engines share, reached by TCP or RDMA.

The client's calls block without a deadline (30 s while the master hangs) and can't be cancelled. They run on a few
threads, each with its own registered memory, and records are copied between that memory and the caller's buffers. A
cancelled call returns immediately: the thread continues in its own memory and never touches the caller's.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import mmap
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal, TypeVar

from mooncake.store import MooncakeDistributedStore

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.vectored import scatter
from kvstore.codec.rows import address_of
from kvstore.config import ByteSize, TierConfig
from kvstore.errors import BackendClosedError, BackendError, BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, Locality, Medium, Outcome

_THREADS: Final = 4
"""Calls in flight; each moves a batch, and the client uses threads of its own for it."""

_SLAB_BYTES: Final = 8 << 20
"""Registered memory of each thread, at least one record: a batch of a tier is 4 to 16 MiB."""

_SETUP_S: Final = 20.0
_CLOSE_S: Final = 5.0
"""Limits for joining and leaving the pool. Leaving takes 17 s without a master; its thread then continues by itself."""

_EXIT_S: Final = 90.0
"""Limit for calls that run at the exit of the process: while the master hangs, each takes up to twice 30 s."""

_NO_SPACE, _NOT_READY, _NOT_FOUND, _EXISTS, _LEASE_ENDED, _RPC_TIMEOUT = -200, -703, -704, -705, -707, -901
"""Codes of ``mooncake-store/include/types.h``; ``_NOT_READY`` means that the record is being put."""

_OUTCOMES: Final = {
    _NO_SPACE: Outcome.NO_SPACE,
    _NOT_READY: Outcome.MISS,
    _NOT_FOUND: Outcome.MISS,
    _LEASE_ENDED: Outcome.MISS,
    _EXISTS: Outcome.EXISTS,
    _RPC_TIMEOUT: Outcome.TIMEOUT,
}
"""All other codes are failures."""

_LANES: Final[weakref.WeakSet[_Lane]] = weakref.WeakSet()

_T = TypeVar("_T")
_Calls = dict[asyncio.Future[None], set[BlockKey]]
"""Running calls: the future that ends with each call, and the keys of the call."""


class MooncakeConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A tier in Mooncake Store."""

    master: str  # ``"host:port"`` of ``mooncake_master``.
    metadata: str = "P2PHANDSHAKE"  # Metadata server of the transfer engine; ``"P2PHANDSHAKE"`` needs none.
    host: str = "127.0.0.1"  # Name or address under which other members of the pool reach this engine.
    segment: ByteSize = ByteSize(0)  # Memory that this engine adds to the pool.
    protocol: Literal["tcp", "rdma"] = "tcp"  # ``"tcp"`` or ``"rdma"``.
    devices: str = ""  # RDMA devices, separated by commas.


class MooncakeBackend(Backend):
    """Records as objects of Mooncake Store, named by namespace and key.

    The store evicts records by itself. By default it keeps one copy of a record, which is lost when its member leaves
    the pool. It has no authentication; only a seal protects records against other clients.
    """

    name: ClassVar[str] = "mooncake"
    config_type: ClassVar[type[TierConfig]] = MooncakeConfig
    medium = Medium.CPU
    locality = Locality.REMOTE
    scans = False

    def __init__(self, config: MooncakeConfig, make_client: Callable[[], Any] = MooncakeDistributedStore) -> None:
        super().__init__(config)
        self.config: MooncakeConfig = config
        self._make_client = make_client
        self._store: Any = None
        self._prefix = ""
        self._lanes: asyncio.Queue[_Lane] = asyncio.Queue()
        self._all_lanes: list[_Lane] = []
        self._putting: dict[BlockKey, asyncio.Future[Outcome]] = {}
        self._reading: _Calls = {}
        self._writing: _Calls = {}
        self._deleting: _Calls = {}
        self._failures = 0

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Join the pool. ``BackendUnavailableError``: the master can't be reached."""
        store, config = self._make_client(), self.config
        self._prefix = f"kvstore/{namespace.hex}/"
        slab_bytes = -(-max(_SLAB_BYTES, geometry.record_bytes_max) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._lanes = asyncio.Queue()
        lanes = self._all_lanes = [_Lane(slab_bytes, geometry.record_bytes_max) for _ in range(_THREADS)]

        def join() -> int:
            code = int(
                store.setup(
                    config.host,
                    config.metadata,
                    int(config.segment),
                    16 << 20,  # The client's own buffer, which these calls don't use.
                    config.protocol,
                    config.devices,
                    config.master,
                )
            )
            for lane in lanes:
                code = code or int(store.register_buffer(lane.address, slab_bytes))
            return code

        try:
            async with asyncio.timeout(_SETUP_S):
                code = await lanes[0].run(join)
        except TimeoutError:
            code = _RPC_TIMEOUT
        if code:
            self._end_lanes()
            raise BackendUnavailableError(
                f"can't join the pool of master {config.master!r} (code {code}). Check that mooncake_master runs there "
                f"and that {config.host!r} is an address of this host.",
                backend=self.name,
            )
        self._store = store
        for lane in lanes:
            self._lanes.put_nowait(lane)

    async def close(self) -> None:
        """Leave the pool, with the records in this engine's segment."""
        store, self._store = self._store, None
        if store is None:
            self._end_lanes()  # Those of a cancelled open().
            return
        lane = _Lane(mmap.PAGESIZE, 1)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    for _ in self._all_lanes:
                        await self._lanes.get()  # Each is free when its call has ended.
                    await lane.run(store.close)
        finally:
            lane.end()
            self._end_lanes()

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool | None]:
        store, names = self._open_store(), [self._name(key) for key in keys]
        async with self._lane() as lane:
            codes = await lane.run(lambda: store.batch_is_exist(names))
        if keys and all(code < 0 for code in codes):
            self._note(f"batch_is_exist: code {codes[0]}")
            raise BackendUnavailableError(f"the master does not answer (code {codes[0]})", backend=self.name)
        return [None if code < 0 else code == 1 for code in codes]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        self._open_store()
        outcomes: dict[int, Outcome] = {}
        rest = list(enumerate(writes))
        while rest:
            others = [(i, self._putting.get(write.key)) for i, write in rest]
            mine = [(i, write) for i, write in rest if write.key not in self._putting]
            mine = list({write.key: (i, write) for i, write in reversed(mine)}.values())[::-1]
            if mine:
                outcomes |= await self._put_some(mine)
            for i, other in others:
                if other is not None:
                    outcome = await asyncio.shield(other)
                    outcomes[i] = Outcome.EXISTS if outcome.ok else outcome
            rest = [(i, write) for i, write in rest if i not in outcomes]
        return [outcomes[i] for i in range(len(writes))]

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        store = self._open_store()
        outcomes: list[Outcome] = []
        while len(outcomes) < len(reads):
            async with self._lane() as lane:
                some = reads[len(outcomes) :][: lane.records_max]
                names = list(dict.fromkeys(self._name(read.key) for read in some))
                read_keys = {read.key for read in some}
                await self._none_of(read_keys, self._deleting)
                answers = await lane.run(partial(_get, store, lane, names), self._noted(read_keys, self._reading))
                for read in some:
                    code, offset = answers[self._name(read.key)]
                    if code < 0:
                        outcomes.append(self._outcome(code, "get"))
                    elif code > read.capacity_bytes:
                        outcomes.append(Outcome.CORRUPT)
                    else:
                        # Copied, so that a call that outlives its deadline cannot touch the slot.
                        scatter(lane.memory[offset : offset + code], read.buffers)
                        read.filled_bytes = code
                        outcomes.append(Outcome.OK)
                        await asyncio.sleep(0)  # Other coroutines run between two copies.
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        store, names = self._open_store(), [self._name(key) for key in keys]
        async with self._lane() as lane:
            # The store reuses the space of a removed record immediately, even during a read. Reads by this engine are
            # waited for; other engines detect the foreign bytes by verification. So are puts past their deadline, whose
            # records would appear after the removal.
            await self._none_of(set(keys), self._reading, self._writing, self._deleting)
            remove = partial(store.batch_remove, names, True)
            codes = await lane.run(remove, self._noted(set(keys), self._deleting))
        for code in codes:
            if code and code not in (_NOT_FOUND, _NOT_READY):
                raise BackendError(f"remove failed with code {code}", backend=self.name)
        return [code == 0 for code in codes]

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield nothing: the client can't list."""
        self._open_store()
        for _ in ():
            yield BlockInfo(b"", 0)

    def stats(self) -> BackendStats:
        return BackendStats(counters={"failed_calls": self._failures})

    async def _put_some(self, writes: Sequence[tuple[int, RecordWrite]]) -> dict[int, Outcome]:
        """Put records of different keys; each key is in ``_putting`` until the medium has answered."""
        loop = asyncio.get_running_loop()
        waiters: dict[BlockKey, asyncio.Future[Outcome]] = {write.key: loop.create_future() for _, write in writes}
        self._putting.update(waiters)
        left = [write for _, write in writes]
        try:
            while left:
                async with self._lane() as lane:
                    some = left[: lane.records_max]
                    call = self._put_batch(lane, some)
                    del left[: len(some)]
                    await call
        finally:
            # A running call settles its keys at its end.
            self._settle([write.key for write in left], [Outcome.CANCELLED] * len(left))
        return {i: waiters[write.key].result() for i, write in writes}

    def _put_batch(self, lane: _Lane, writes: Sequence[RecordWrite]) -> Coroutine[Any, Any, object]:
        """Copy records into a lane's memory, and return the call that puts them and settles their keys at its end."""
        store, keys = self._open_store(), [write.key for write in writes]
        pieces: list[tuple[int, int]] = []
        for i, write in enumerate(writes):
            # As in get_into: a put that outlives its deadline must not read the slot.
            start = end = i * lane.record_bytes_max
            for buffer in write.buffers:
                lane.memory[end : end + buffer.nbytes] = buffer
                end += buffer.nbytes
            pieces.append((start, end - start))
        unregister = self._noted(set(keys), self._writing)

        def ended(answer: Any) -> None:
            unregister(answer)
            failed = answer.cancelled() or answer.exception() is not None
            codes = [-1] * len(keys) if failed else answer.result()
            self._settle(keys, [self._outcome(code, "put") for code in codes])

        return lane.run(partial(_put, store, lane, list(map(self._name, keys)), pieces), ended)

    def _settle(self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> None:
        for key, outcome in zip(keys, outcomes, strict=True):
            self._putting.pop(key).set_result(outcome)

    async def _none_of(self, keys: set[BlockKey], *calls: _Calls) -> None:
        """Wait until no running call in ``calls`` has any of the keys."""
        while others := [end for some in calls for end, theirs in some.items() if not theirs.isdisjoint(keys)]:
            await asyncio.wait(others)

    def _noted(self, keys: set[BlockKey], calls: _Calls) -> Callable[[Any], None]:
        """Register a running call with its keys; return the callback for its end, which unregisters it."""
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        calls[end] = keys

        def ended(_: Any) -> None:
            del calls[end]
            end.set_result(None)

        return ended

    def _name(self, key: BlockKey) -> str:
        return self._prefix + key.hex()

    def _outcome(self, code: int, call: str) -> Outcome:
        if code >= 0:
            return Outcome.OK
        outcome = _OUTCOMES.get(code, Outcome.IO_ERROR)
        if outcome.is_failure:
            self._note(f"{call}: code {code}")
        return outcome

    def _note(self, text: str) -> None:
        self._failures += 1
        self.last_error = text

    def _open_store(self) -> Any:
        if self._store is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)
        return self._store

    @contextlib.asynccontextmanager
    async def _lane(self) -> AsyncIterator[_Lane]:
        """Lend a free thread; it is free again when its call has ended, however late."""
        self._open_store()  # After close(), no lane becomes free.
        lanes = self._lanes
        lane = await lanes.get()
        try:
            self._open_store()
            yield lane
        finally:
            lane.when_idle(lambda: lanes.put_nowait(lane))

    def _end_lanes(self) -> None:
        for lane in self._all_lanes:
            lane.end()
        self._all_lanes = []


class _Lane:
    """A thread and its memory; one call at a time."""

    def __init__(self, slab_bytes: int, record_bytes_max: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, slab_bytes))
        self.address = address_of(self.memory)  # Start address of the memory.
        self.record_bytes_max = record_bytes_max  # Distance between two records in the memory.
        self.records_max = slab_bytes // record_bytes_max  # Number of records that fit into the memory.
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]] | None]
        self._calls = queue.SimpleQueue()
        self._current: asyncio.Future[Any] | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()
        # A daemon thread, because it also waits for calls of a backend that is never closed.
        self._thread = threading.Thread(target=self._work, name="kvstore-mooncake", daemon=True)
        self._thread.start()
        _LANES.add(self)

    async def run(self, function: Callable[[], _T], ended: Callable[[Any], None] | None = None) -> _T:
        """Make a call and return its result. If cancelled, it returns immediately, and the call continues."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed, so nothing awaits the result.
                loop.call_soon_threadsafe(_set, future, result, error)

        self._current = future
        self._is_idle.clear()
        self._calls.put((function, done))
        if ended is not None:
            future.add_done_callback(ended)
        return await asyncio.shield(future)

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call back when no call is running."""
        if self._current is None or self._current.done():
            callback()
        else:
            self._current.add_done_callback(lambda _: callback())

    def end(self) -> None:
        """End the thread after its call."""
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            function, done = item
            try:
                result, error = function(), None
            except BaseException as failure:  # Raised where the call is awaited.
                result, error = None, failure
            self._is_idle.set()
            done(result, error)

    def join(self, deadline: float) -> None:
        """Wait for the end of the running call, at most until ``deadline``."""
        # In a forked process, the thread is gone.
        if self._thread.is_alive():
            self._is_idle.wait(max(0.0, deadline - time.monotonic()))


@atexit.register
def _join_lanes() -> None:
    """Wait for running calls: one that returned while Python ends would abort the process."""
    deadline = time.monotonic() + _EXIT_S
    for lane in list(_LANES):
        lane.join(deadline)


def _set(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # Marks it as retrieved, because nothing awaits it after a cancellation.


def _put(store: Any, lane: _Lane, names: list[str], pieces: Sequence[tuple[int, int]]) -> list[int]:
    """Publish records from a lane's memory; return a code for each. The session makes the first writer win."""
    codes = list(store.batch_put_session_start(names, [size for _, size in pieces]))
    open_ = [i for i, code in enumerate(codes) if code == 0]
    if open_:
        moved = store.batch_put_from_multi_buffer_ranges(
            [names[i] for i in open_],
            [[lane.address + pieces[i][0]] for i in open_],
            [[pieces[i][1]] for i in open_],
            [[0] for _ in open_],
        )
        whole = [i for i, size in zip(open_, moved, strict=True) if size == pieces[i][1]]
        for i, size in zip(open_, moved, strict=True):
            codes[i] = 0 if size == pieces[i][1] else min(int(size), -1)
        if torn := [names[i] for i in open_ if i not in whole]:
            store.batch_put_session_revoke(torn)
        if whole:
            for i, code in zip(whole, store.batch_put_session_end([names[i] for i in whole]), strict=True):
                codes[i] = code
    return codes


def _get(store: Any, lane: _Lane, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Read records into a lane's memory; return length (or code) and offset of each. Overlong records are not read."""
    found: Mapping[str, Any] = store.batch_get_replica_desc(names)
    if not found and names and (code := store.is_exist(names[0])) < 0:
        return dict.fromkeys(names, (code, 0))
    answers = dict.fromkeys(names, (_NOT_FOUND, 0))
    wanted: list[str] = []
    for i, name in enumerate(names):
        if replicas := found.get(name):
            in_memory = replicas[0].is_memory_replica()
            length = replicas[0].get_memory_descriptor().buffer_descriptor.size if in_memory else store.get_size(name)
            answers[name] = int(length), i * lane.record_bytes_max
            if 0 <= length <= lane.record_bytes_max:
                wanted.append(name)
    if wanted:
        addresses = [lane.address + answers[name][1] for name in wanted]
        # With room for the longest record, because a longer one may have replaced this one since.
        codes = store.batch_get_into(wanted, addresses, [lane.record_bytes_max] * len(wanted))
        answers |= {name: (int(code), answers[name][1]) for name, code in zip(wanted, codes, strict=True)}
    return answers
