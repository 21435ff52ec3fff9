"""The part of the backend suite that is about opening, closing, restarts, limits and a medium that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.backends.base import Backend
from kvstore.errors import BackendClosedError, BackendError
from kvstore.namespace import Namespace
from kvstore.testing.backend_harness import BackendHarness, in_loop
from kvstore.types import BlockKey, Outcome, RemovalCause

__all__ = ["BackendLifecycleTests"]


class BackendLifecycleTests(BackendHarness):
    """From ``open`` to ``close`` and over it."""

    @in_loop
    async def test_close_is_idempotent(self) -> None:
        """A backend can be closed twice, and without ever having been open."""
        backend = await self.opened_backend()
        await backend.close()
        await backend.close()
        never = await self.make_backend()
        await never.close()

    @in_loop
    async def test_use_outside_of_open_and_close(self) -> None:
        """Before ``open`` and after ``close`` calls raise ``BackendClosedError``; ``touch`` and ``stats`` do not."""
        for backend in (await self.make_backend(), await self._closed()):
            maker = self.maker(backend)
            key = maker.key()
            await self.raises(BackendClosedError, backend.exists([key]), "exists")
            await self.raises(BackendClosedError, backend.put([maker.write(key, b"x")]), "put")
            await self.raises(BackendClosedError, backend.get_into([maker.target(key).read]), "get_into")
            await self.raises(BackendClosedError, backend.delete([key]), "delete")
            await self.raises(BackendClosedError, self.scanned(backend), "scan")
            await self.raises(BackendClosedError, backend.probe(), "probe")
            backend.touch([key])
            backend.stats()
            await backend.close()

    @in_loop
    async def test_close_while_calls_run(self) -> None:
        """A close lets running calls end, with outcomes or a ``BackendError``; then no buffer is written any more."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload() for _ in range(16)}
        await self.put_all(backend, values)
        targets = [maker.target(key) for key in values]
        calls: list[asyncio.Task[Sequence[Outcome]]] = []
        for start in range(0, 16, 4):
            reads = [target.read for target in targets[start : start + 4]]
            calls.append(asyncio.ensure_future(backend.get_into(reads)))
            calls.append(asyncio.ensure_future(backend.put([maker.write(maker.key(), maker.payload())])))
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        await backend.close()
        done, running = await asyncio.wait(calls, timeout=self.time_limit_s / 2)
        assert not running, f"{len(running)} calls did not end though the backend is closed"
        for target in targets:
            target.fill()
        for call in done:
            error = call.exception()
            assert error is None or isinstance(error, BackendError), f"a call that was closed upon raised {error!r}"
        assert all(target.untouched for target in targets), "a buffer was written after its call had returned"

    @in_loop
    async def test_blocks_outlive_a_restart(self) -> None:
        """What was put is there after a close and an open, what was deleted is not, and a scan knows."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(self.rng.choice((1, 4096, 10_000))) for _ in range(60)}
        await self.put_all(backend, values)
        gone = list(values)[:10] if self.deletes else []
        await backend.delete(gone)
        again = await self.restarted(backend)
        if again is None:
            return
        expected = [None if key in gone else payload for key, payload in values.items()]
        assert await self.get_all(again, list(values)) == expected, "other blocks than before the restart"
        if self.scans:
            assert set(await self.scanned(again)) == set(values) - set(gone), "a scan after the restart is wrong"
        outcomes = await again.put([maker.write(key, maker.payload(50)) for key in list(values)[10:20]])
        assert list(outcomes) == [Outcome.EXISTS] * 10, f"put of blocks from before the restart: {outcomes}"

    @in_loop
    async def test_namespaces_do_not_meet(self) -> None:
        """A backend opened with another namespace on the same medium finds nothing, and harms nothing."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(5000) for _ in range(8)}
        await self.put_all(backend, values)
        other = await self.restarted(backend, Namespace({"suite": "another"}))
        if other is None:
            return
        assert list(await other.exists(list(values))) == [False] * 8, "a block of another namespace exists"
        if self.scans:
            assert await self.scanned(other) == {}, "a scan yields blocks of another namespace"
        others = self.maker(other, Namespace({"suite": "another"}))
        outcomes = await other.put([others.write(key, others.payload(600)) for key in values])
        assert list(outcomes) == [Outcome.OK] * 8, f"put in another namespace: {outcomes}"
        await other.delete(list(values)[:4])
        first = await self.restarted(other)
        assert first is not None, "could be opened once, and not again"
        assert await self.get_all(first, list(values)) == list(values.values()), "another namespace changed blocks"

    @in_loop
    async def test_capacity_is_kept(self) -> None:
        """However much is put, never more than the capacity is held; what left was told, what stayed is intact."""
        record_bytes = self.geometry(await self.make_backend()).record_bytes_max
        backend = await self.make_small_backend(16 * record_bytes + record_bytes // 2)
        if backend is None:
            return
        removed: list[BlockKey] = []

        def note(keys: Sequence[BlockKey], cause: RemovalCause) -> None:
            assert cause is RemovalCause.EVICTED, f"blocks left with cause {cause!r}"
            removed.extend(keys)

        backend.set_removal_listener(note)
        await self.opened_backend(backend)
        maker = self.maker(backend)
        values: dict[BlockKey, bytes] = {}
        refused = 0
        for _ in range(16):
            batch = {maker.key(): maker.payload() for _ in range(4)}
            outcomes = await backend.put([maker.write(key, payload) for key, payload in batch.items()])
            assert set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}, f"put into a full backend: {outcomes}"
            values |= {key: batch[key] for key, outcome in zip(batch, outcomes, strict=True) if outcome.ok}
            refused += list(outcomes).count(Outcome.NO_SPACE)
            stats = backend.stats()
            assert stats.used_bytes <= stats.capacity_bytes, f"{stats.used_bytes} bytes of {stats.capacity_bytes}"
        await self._settled(backend, values, removed)
        assert len(removed) == len(set(removed)), "a block was told to have left twice"
        assert removed or refused, "64 blocks were put into room for 16, and nothing left and nothing was refused"
        got = await self.get_all(backend, list(values))
        for (key, payload), back in zip(values.items(), got, strict=True):
            assert back == (None if key in removed else payload), f"key {key.hex()} is not what its eviction says"

    @in_loop
    async def test_a_block_in_use_outlives_one_that_is_not(self) -> None:
        """What is read again and again is not the first to go when the backend is full."""
        record_bytes = self.geometry(await self.make_backend()).record_bytes_max
        backend = await self.make_small_backend(16 * record_bytes + record_bytes // 2)
        if backend is None:
            return
        await self.opened_backend(backend)
        maker = self.maker(backend)
        hot = maker.key()
        await self.put_all(backend, {hot: maker.payload()})
        for _ in range(40):
            await backend.put([maker.write(maker.key(), maker.payload())])
            backend.touch([hot])
            await self.get_all(backend, [hot])
        assert list(await backend.exists([hot])) == [True], "the block that was used all the time was evicted"

    @in_loop
    async def test_a_medium_that_fails_is_not_an_absent_block(self) -> None:
        """While the medium fails, ``exists`` and ``probe`` raise and blocks fail; when it is back, all are there."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(5000) for _ in range(4)}
        await self.put_all(backend, values)
        if not await self.break_medium(backend):
            return
        try:
            await self.raises(BackendError, backend.exists(list(values)), "exists on a broken medium")
            await self.raises(BackendError, backend.probe(), "probe of a broken medium")
            await self._fails(backend.put([maker.write(maker.key(), maker.payload())]), "put to a broken medium")
            reads = [maker.target(key).read for key in values]
            await self._fails(backend.get_into(reads), "get from a broken medium")
        finally:
            await self.mend_medium(backend)
        await backend.probe()
        assert await self.get_all(backend, list(values)) == list(values.values()), "blocks were lost by an outage"

    @in_loop
    async def test_a_key_that_fails_costs_only_itself(self) -> None:
        """While the medium fails for one key, the others exist and can be read; of the one nothing is said."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(5000) for _ in range(6)}
        await self.put_all(backend, values)
        bad = next(iter(values))
        if not await self.break_key(backend, bad):
            return
        try:
            for keys in ([bad], list(values), [bad, maker.key()]):
                answers = dict(zip(keys, await backend.exists(keys), strict=True))
                assert answers[bad] is None, f"a key that fails is {answers[bad]}"
                assert all(answers[key] is (key in values) for key in keys[1:]), f"others are hidden: {answers}"
            reads = [maker.target(key).read for key in values]
            bad_outcome, *outcomes = await backend.get_into(reads)
            assert bad_outcome.is_failure, f"a block that can't be read is {bad_outcome}"
            assert set(outcomes) == {Outcome.OK}, f"others can't be read: {outcomes}"
        finally:
            await self.mend_medium(backend)
        assert list(await backend.exists([bad])) == [True], "a key that failed is lost"

    async def _closed(self) -> Backend:
        backend = await self.opened_backend()
        await backend.close()
        return backend

    async def _settled(self, backend: Backend, values: dict[BlockKey, bytes], removed: list[BlockKey]) -> None:
        """Wait until what exists is what was put and not told to have left; eviction may lag behind a put."""
        keys = list(values)
        deadline = asyncio.get_running_loop().time() + self.time_limit_s / 2
        while list(await backend.exists(keys)) != [key not in removed for key in keys]:
            assert asyncio.get_running_loop().time() < deadline, "blocks are gone of which nobody was told"
            await asyncio.sleep(0.001)

    async def _fails(self, call: object, what: str) -> None:
        try:
            outcomes = await call  # type: ignore[misc]
        except BackendError:
            return
        assert all(outcome.is_failure for outcome in outcomes), f"{what}: {outcomes}"
