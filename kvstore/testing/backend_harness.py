"""Shared parts of the backend suites: creating backends, running a check in a loop that must not block, the seed."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, Final, SupportsIndex, TypeVar

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.codec.record import HEADER_BYTES
from kvstore.errors import BackendClosedError, KVStoreError
from kvstore.namespace import Namespace
from kvstore.testing.records import RecordMaker, Target
from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed
from kvstore.types import BlockInfo, BlockKey, Outcome

_H = TypeVar("_H", bound="BackendHarness")

_MAY_BLOCK: Final = frozenset(
    {"make_backend", "reopen", "make_small_backend", "break_medium", "mend_medium", "break_key", "open", "close"}
)
"""Methods that may block: those that prepare a check, and a backend's ``open`` and ``close``."""

_SOURCES: Final = (".py", ".pyc", ".so")
"""Files that Python itself opens for imports and tracebacks."""

_active: LoopGuard | None = None
_is_installed = False

_EVENTS: Final = frozenset({"open", "socket.connect", "sqlite3.connect"})
_sleep: Final = time.sleep


def in_loop(check: Callable[[_H], Awaitable[None]]) -> Callable[[_H], None]:
    """Make a test of an async check: it runs in its own loop, under a time limit, and closes its backends.

    It needs no pytest plugin. A failure has a note with the seed.
    """

    @functools.wraps(check)
    def test(self: _H) -> None:
        seed = fresh_seed()
        self.rng = random.Random(seed)
        self.opened = []
        try:
            asyncio.run(_run(self, check))
        except BaseException as error:
            error.add_note(f"Repeat it with {SEED_VARIABLE}={seed}.")
            raise

    return test


class BackendHarness:
    """Properties of the tested backend, set by a subclass of :class:`~kvstore.testing.BackendTests`, and helpers."""

    namespace: Namespace = Namespace({"suite": "backend"})  # Namespace of the backends.
    payload_bytes_max: ClassVar[int] = 65536  # Slot size of the checks; a multiple of 4096.
    scans: ClassVar[bool] = True  # Whether ``scan`` yields all blocks (a ``SimpleBackend`` need not).
    deletes: ClassVar[bool] = True  # Whether ``delete`` and ``quarantine`` remove.
    too_long: ClassVar[Outcome] = Outcome.CORRUPT  # Outcome for a record that is longer than the buffers.
    time_limit_s: float = 60.0  # Time limit of each check.
    cancel_rounds: ClassVar[int] = 40  # Number of cancelled calls, for each of ``put`` and ``get_into``.
    rng: random.Random  # Seeded; fresh in each check.
    opened: list[Backend]

    async def make_backend(self) -> Backend:
        """Return a backend, not opened, over an empty medium (another one in each call)."""
        raise NotImplementedError

    async def reopen(self, backend: Backend) -> Backend | None:
        """Return a backend, not open, on the medium of a closed one; None if that medium is gone."""
        return None

    async def make_small_backend(self, capacity_bytes: int) -> Backend | None:
        """Return a backend as :meth:`make_backend` does, with this capacity; None if it can't have one."""
        return None

    async def break_medium(self, backend: Backend) -> bool:
        """Make the medium of an open backend fail from now on; False if that can't be done."""
        return False

    async def mend_medium(self, backend: Backend) -> None:
        """Undo :meth:`break_medium`, or :meth:`break_key`."""

    async def break_key(self, backend: Backend, key: BlockKey) -> bool:
        """Make the medium fail for one key, such as one denied object or failed node; False if that can't be done."""
        return False

    async def opened_backend(self, backend: Backend | None = None, namespace: Namespace | None = None) -> Backend:
        """Open a backend (a new one unless given); it is closed when the check ends."""
        backend = backend or await self.make_backend()
        self.opened.append(backend)
        await backend.open(namespace or self.namespace, self.geometry(backend))
        return backend

    async def restarted(self, backend: Backend, namespace: Namespace | None = None) -> Backend | None:
        """Close a backend and open another one over its medium, if that is possible."""
        await backend.close()
        again = await self.reopen(backend)
        return None if again is None else await self.opened_backend(again, namespace)

    def geometry(self, backend: Backend) -> RecordGeometry:
        """Return the sizes that a tier would give this backend."""
        unit = backend.alignment
        return RecordGeometry(-(-HEADER_BYTES // unit) * unit, self.payload_bytes_max)

    def maker(self, backend: Backend, namespace: Namespace | None = None) -> RecordMaker:
        """Return a maker of records for a backend."""
        return RecordMaker(namespace or self.namespace, self.geometry(backend), self.rng)

    async def put_all(self, backend: Backend, values: dict[BlockKey, bytes]) -> None:
        """Put payloads under new keys in one batch, and check that all outcomes are OK."""
        maker = self.maker(backend)
        outcomes = await backend.put([maker.write(key, payload) for key, payload in values.items()])
        assert len(outcomes) == len(values), f"{len(outcomes)} outcomes for {len(values)} writes: return one for each"
        other = [
            f"key {key.hex()}: {outcome!r}"
            for key, outcome in zip(values, outcomes, strict=True)
            if outcome is not Outcome.OK
        ]
        assert not other, f"put of new keys, {', '.join(other[:3])}: return OK for each; EXISTS takes a key for another"

    async def get_all(self, backend: Backend, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """Read keys in one batch; return the verified payload of each, or None for a miss. Other outcomes fail."""
        maker = self.maker(backend)
        targets = [maker.target(key) for key in keys]
        outcomes = await backend.get_into([target.read for target in targets])
        assert len(outcomes) == len(keys), f"{len(outcomes)} outcomes for {len(keys)} reads: return one for each"
        return [self.payload_of(maker, target, outcome) for target, outcome in zip(targets, outcomes, strict=True)]

    def payload_of(self, maker: RecordMaker, target: Target, outcome: Outcome) -> bytes | None:
        """Return the payload of an OK read, None for a MISS; other outcomes fail the check."""
        if outcome is Outcome.OK:
            return maker.content(target)
        assert outcome is Outcome.MISS, (
            f"key {target.key.hex()}: {outcome!r}, expected OK if it is there, else MISS (the log has errors)"
        )
        assert target.guards_intact, f"key {target.key.hex()}: a MISS wrote outside of the buffers: leave them alone"
        return None

    async def scanned(self, backend: Backend) -> dict[BlockKey, int]:
        """Return the result of a scan as sizes by key; a duplicate key fails the check."""
        found: dict[BlockKey, int] = {}
        async for info in backend.scan():
            assert isinstance(info, BlockInfo), f"scan yields {info!r}: yield a BlockInfo for each block"
            assert info.key not in found, f"scan yields key {info.key.hex()} twice: yield each block once"
            found[info.key] = info.size_bytes
        return found

    async def raises(self, kind: type[KVStoreError], call: Awaitable[object], what: str) -> None:
        """Check that a call raises an error of this kind, not within an exception group."""
        is_closed = kind is BackendClosedError
        remedy = "; check first whether it is open (self.check_open() of SimpleBackend)" if is_closed else ""
        try:
            result = await call
        except kind:
            return
        # Any other exception violates the contract and becomes the message of the failed check.
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}, expected {kind.__name__}{remedy}") from error
        raise AssertionError(f"{what}: returned {result!r}, expected {kind.__name__}{remedy}")


class LoopGuard:
    """Records the first blocking call on the entering thread while its event loop runs.

    ``time.sleep``, ``open``, ``sqlite3.connect`` and the connect of a blocking socket count as blocking. Calls within
    exempt methods (by name, of the given classes) do not count, because the preparation of a test may block.
    """

    def __init__(self, kinds: tuple[type, ...], exempt: frozenset[str]) -> None:
        self.found = ""  # The call and its caller; empty without a blocking call.
        self._kinds = kinds
        self._exempt = exempt
        self._thread = threading.get_ident()

    def __enter__(self) -> LoopGuard:
        global _active, _is_installed
        if not _is_installed:
            # Once: an audit hook can't be removed.
            sys.addaudithook(_on_event)
            _is_installed = True
        _active = self
        time.sleep = self._sleep  # Reported by Python 3.13 and later only.
        return self

    def __exit__(self, *exc_info: object) -> None:
        global _active
        _active = None
        time.sleep = _sleep

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an audit event of the interpreter, if it blocks the loop of this guard's thread."""
        if self.found or threading.get_ident() != self._thread or asyncio._get_running_loop() is None:
            return
        if event == "open" and (args[1] is None or str(args[0]).endswith(_SOURCES)):
            return  # os.open, for files that cannot block.
        if event == "socket.connect" and args[0].gettimeout() == 0:
            return
        frame: FrameType | None = sys._getframe(2)
        caller = frame
        while frame is not None:
            if frame.f_code.co_name in self._exempt and isinstance(frame.f_locals.get("self"), self._kinds):
                return
            frame = frame.f_back
        where = "".join(traceback.format_list(traceback.extract_stack(caller)[-4:]))
        self.found = f"{event} blocks the event loop; do it with kvstore.backends.threads.run_in_thread:\n{where}"

    def _sleep(self, seconds: float | SupportsIndex, /) -> None:
        self.note("time.sleep", (seconds,))
        _sleep(seconds)


async def _run(harness: _H, check: Callable[[_H], Awaitable[None]]) -> None:
    guard = LoopGuard((Backend, BackendHarness), _MAY_BLOCK)
    try:
        with guard:
            try:
                async with asyncio.timeout(harness.time_limit_s) as limit:
                    await check(harness)
            except TimeoutError as error:
                if not limit.expired():  # Raised by the backend.
                    raise
                late = f"the check took longer than {harness.time_limit_s:g} s"
                raise AssertionError(
                    guard.found or f"{late}: give each wait for the medium a deadline, or set time_limit_s"
                ) from error
        assert not guard.found, guard.found
    finally:
        for backend in harness.opened:
            async with asyncio.timeout(harness.time_limit_s):
                await backend.close()


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS and _active is not None:
        _active.note(event, args)
