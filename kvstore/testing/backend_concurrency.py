"""The part of the backend suite that is about many calls at once, and calls that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from kvstore.backends.base import Backend
from kvstore.testing.backend_harness import BackendHarness, in_loop
from kvstore.testing.records import RecordMaker, Target
from kvstore.types import BlockKey, Outcome

__all__ = ["BackendConcurrencyTests"]

_LATE_S = 0.05
"""How long to watch buffers that must not be written: that something never happens can only be seen by waiting."""


class BackendConcurrencyTests(BackendHarness):
    """Any number of calls, on the same keys, given up at any point."""

    @in_loop
    async def test_one_batch_of_many_blocks(self) -> None:
        """A batch may be much longer than what a medium does at once."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(self.rng.randrange(1, 5000)) for _ in range(500)}
        await self.put_all(backend, values)
        assert await self.get_all(backend, list(values)) == list(values.values()), "a long batch came back different"

    @in_loop
    async def test_many_batches_at_once(self) -> None:
        """While many batches put, get and delete the same keys, a get sees a whole value of its key or none."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        written: dict[BlockKey, set[bytes]] = {maker.key(): set() for _ in range(12)}
        await asyncio.gather(*(self._busy(backend, maker, written) for _ in range(16)))
        keys = list(written)
        got = await self.get_all(backend, keys)
        assert await self.get_all(backend, keys) == got, "two gets in a row see different blocks"
        assert list(await backend.exists(keys)) == [back is not None for back in got], "exists contradicts get"

    @in_loop
    async def test_of_many_first_writers_one_wins(self) -> None:
        """When many put the same keys at once, each key is OK for exactly one of them, and his are the bytes."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        keys = [maker.key() for _ in range(10)]
        offers = [{key: maker.payload(self.rng.randrange(1, 9000)) for key in keys} for _ in range(12)]
        batches = [[maker.write(key, offer[key]) for key in self.rng.sample(keys, len(keys))] for offer in offers]
        answers = await asyncio.gather(*(backend.put(batch) for batch in batches))
        winners: dict[BlockKey, list[bytes]] = {key: [] for key in keys}
        for batch, outcomes, offer in zip(batches, answers, offers, strict=True):
            assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS}, f"racing puts: {outcomes}"
            for write, outcome in zip(batch, outcomes, strict=True):
                if outcome is Outcome.OK:
                    winners[write.key].append(offer[write.key])
        counts = [len(won) for won in winners.values()]
        assert counts == [1] * len(keys), f"writers for whom a key was OK, by key: {counts}"
        got = await self.get_all(backend, keys)
        assert got == [winners[key][0] for key in keys], "the bytes are not those of the writer that won"

    @in_loop
    async def test_gets_beside_a_put_see_all_or_nothing(self) -> None:
        """A record that is being put is not visible in parts."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        for _ in range(8):
            values = {maker.key(): maker.payload() for _ in range(4)}
            put = asyncio.ensure_future(self.put_all(backend, values))
            while not put.done():
                got = await self.get_all(backend, list(values))
                assert set(got) <= {None, *values.values()}, "a get saw something that was not put"
                await asyncio.sleep(0)
            await put
            assert await self.get_all(backend, list(values)) == list(values.values()), "put, and not there"

    @in_loop
    async def test_no_buffer_is_written_after_a_cancelled_get(self) -> None:
        """Once a get has ended, cancelled or not, its buffers belong to others: nothing is written into them."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload() for _ in range(12)}
        await self.put_all(backend, values)
        watched: list[Target] = []
        for _ in range(self.cancel_rounds):
            targets = [maker.target(key) for key in self.rng.sample(sorted(values), self.rng.randrange(1, 8))]
            outcomes = await self._cancelled(backend.get_into([target.read for target in targets]))
            for target, outcome in zip(targets, outcomes or (), strict=bool(outcomes)):
                assert self.payload_of(maker, target, outcome) == values[target.key], "a get returned another block"
            for target in targets:
                target.fill()
            # The header and payload of one block in four are enough to watch, and keep memory small.
            watched.extend(targets[::4])
            # Others use the backend meanwhile, so that work left behind would be picked up.
            assert list(await backend.exists([targets[0].key])) == [True], "a cancelled get lost a block"
        await asyncio.sleep(_LATE_S)
        await backend.close()
        late = sum(not target.untouched for target in watched)
        assert not late, f"{late} of {len(watched)} buffers were written after their get had ended"

    @in_loop
    async def test_no_buffer_is_read_after_a_cancelled_put(self) -> None:
        """Once a put has ended, its buffers belong to others: a key holds what they were then, or nothing."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values: dict[BlockKey, bytes] = {}
        for _ in range(self.cancel_rounds):
            batch = {maker.key(): maker.payload() for _ in range(self.rng.randrange(1, 5))}
            writes = [maker.write(key, payload) for key, payload in batch.items()]
            await self._cancelled(backend.put(writes))
            for write in writes:
                for buffer in write.buffers:
                    buffer[:] = b"\x5a" * buffer.nbytes
            values |= batch
        await self._all_whole(backend, values)
        again = await self.restarted(backend)
        if again is not None:
            await self._all_whole(again, values)

    @in_loop
    async def test_a_cancelled_call_leaves_the_backend_as_good_as_before(self) -> None:
        """After many cancelled calls of all kinds, at once, everything still works."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        keys = [maker.key() for _ in range(6)]

        def calls() -> list[Awaitable[object]]:
            return [
                backend.put([maker.write(key, maker.payload(5000)) for key in keys]),
                backend.get_into([maker.target(key).read for key in keys]),
                backend.exists(keys),
                backend.delete(keys[:3]),
                self.scanned(backend),
            ]

        for _ in range(self.cancel_rounds // 4):
            await asyncio.gather(*(self._cancelled(call) for call in calls()))
        fresh = {maker.key(): maker.payload() for _ in range(6)}
        await self.put_all(backend, fresh)
        assert await self.get_all(backend, list(fresh)) == list(fresh.values()), "put after cancellations, not there"

    async def _busy(self, backend: Backend, maker: RecordMaker, written: dict[BlockKey, set[bytes]]) -> None:
        for _ in range(20):
            keys = self.rng.sample(sorted(written), self.rng.randrange(1, 5))
            what = self.rng.random()
            if what < 0.4:
                batch = {key: maker.payload(self.rng.randrange(1, 9000)) for key in keys}
                for key, payload in batch.items():
                    written[key].add(payload)
                outcomes = await backend.put([maker.write(key, payload) for key, payload in batch.items()])
                assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS}, f"put beside others: {outcomes}"
            elif what < 0.8 or not self.deletes:
                for key, back in zip(keys, await self.get_all(backend, keys), strict=True):
                    assert back is None or back in written[key], "a get saw a value that nobody put under its key"
            elif what < 0.9:
                await backend.delete(keys)
            else:
                await backend.exists(keys)

    async def _cancelled(self, call: Awaitable[object]) -> Sequence[Outcome] | None:
        """Start a call, cancel it at a random point (twice, sometimes), wait for its end; its result if it has one."""
        task: asyncio.Future[object] = asyncio.ensure_future(call)
        if self.rng.random() < 0.7:
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.rng.random() * 0.003)
        task.cancel()
        if self.rng.random() < 0.3:
            await asyncio.sleep(0)
            task.cancel()
        _, running = await asyncio.wait([task], timeout=self.time_limit_s / 4)
        assert not running, "a cancelled call did not end"
        if task.cancelled():
            return None
        result = task.result()
        return result if isinstance(result, list) else None

    async def _all_whole(self, backend: Backend, values: dict[BlockKey, bytes]) -> None:
        """Insist that every key holds its value, proved, or nothing."""
        got = await self.get_all(backend, list(values))
        for (key, payload), back in zip(values.items(), got, strict=True):
            assert back in (None, payload), f"key {key.hex()} holds bytes that were written after its put had ended"
        if self.scans:
            there = {key for key, back in zip(values, got, strict=True) if back is not None}
            assert set(await self.scanned(backend)) == there, "a scan yields blocks that can't be read"
