"""The contract of a backend as a test suite, to be subclassed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from kvstore.backends.base import Backend, RecordRead
from kvstore.errors import BackendClosedError, BackendError
from kvstore.namespace import Namespace
from kvstore.testing.backend_harness import BackendHarness, in_loop
from kvstore.testing.records import RecordMaker, Target
from kvstore.types import KEY_BYTES_MAX, BlockKey, Outcome, RemovalCause


class BackendValueTests(BackendHarness):
    """Batches of puts, gets, deletes and scans, one after the other."""

    @in_loop
    async def test_round_trip_of_all_lengths(self) -> None:
        """Payloads from one byte to a whole slot are read back unchanged, into buffers at least as long."""
        backend = await self.opened_backend()
        maker, most = self.maker(backend), self.payload_bytes_max
        lengths = [1, 2, 255, 256, 4095, 4096, 4097, 8192, most - 4096, most - 1, most]
        values = {maker.key(): maker.payload(length) for length in lengths}
        await self.put_all(backend, values)
        got = await self.get_all(backend, list(values))
        for payload, back in zip(values.values(), got, strict=True):
            assert back == payload, f"a payload of {len(payload)} bytes came back different"

    @in_loop
    async def test_read_into_buffers_of_exact_length(self) -> None:
        """A record fits into buffers of exactly its length, and nothing is written after them."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(length) for length in (1, 4096, 5000, self.payload_bytes_max)}
        await self.put_all(backend, values)
        targets = [maker.target(key, len(payload)) for key, payload in values.items()]
        outcomes = await backend.get_into([target.read for target in targets])
        assert list(outcomes) == [Outcome.OK] * len(values), f"outcomes {outcomes}"
        for target, payload in zip(targets, values.values(), strict=True):
            assert maker.content(target) == payload, f"a payload of {len(payload)} bytes came back different"

    @in_loop
    async def test_record_longer_than_buffers(self) -> None:
        """A record that does not fit is CORRUPT (or ``too_long``), and nothing is written outside of the buffers."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        key = maker.key()
        await self.put_all(backend, {key: maker.payload()})
        target = maker.target(key, self.payload_bytes_max - 4096)
        (outcome,) = await backend.get_into([target.read])
        assert outcome is self.too_long, (
            f"{outcome!r} for a record that is longer than the buffers: compare the lengths before you write"
        )
        assert target.guards_intact, "bytes were written outside of the buffers: return CORRUPT for a longer record"

    @in_loop
    async def test_buffers_of_all_kinds(self) -> None:
        """Buffers may have any origin and alignment, and a payload may be in one buffer or several."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        for kind in ("mmap", "bytearray", "numpy", "odd"):
            for parts in (1, 2, 5):
                key, payload = maker.key(), maker.payload(self.rng.choice((4096, 10_000, self.payload_bytes_max)))
                outcomes = await backend.put([maker.write(key, payload, kind, parts)])
                assert list(outcomes) == [Outcome.OK], f"put from {parts} buffers of kind {kind}: {outcomes}"
                target = maker.target(key, None, kind, parts)
                outcomes = await backend.get_into([target.read])
                assert list(outcomes) == [Outcome.OK], f"get into {parts} buffers of kind {kind}: {outcomes}"
                assert maker.content(target) == payload, f"{parts} buffers of kind {kind}: the payload is another"

    @in_loop
    async def test_miss_is_a_value(self) -> None:
        """A key that was never put is a MISS and does not exist; no call raises for it."""
        backend = await self.opened_backend()
        keys = [self.maker(backend).key() for _ in range(20)]
        assert await self.get_all(backend, keys) == [None] * 20, (
            "a key that was never put was found: return None for it"
        )
        assert list(await backend.exists(keys)) == [False] * 20, "a key that was never put exists: return False for it"
        assert list(await backend.delete(keys)) == [False] * 20, (
            "a key that was never put was deleted: return False for it"
        )
        await backend.quarantine(keys)
        backend.touch(keys)

    @in_loop
    async def test_each_block_of_a_mixed_batch_has_its_own_outcome(self) -> None:
        """Each answer belongs to its block in batches of hits, misses, new and known keys in random order."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        held: dict[BlockKey, bytes] = {}
        for _ in range(6):
            fresh = {maker.key(): maker.payload(self.rng.randrange(1, 9000)) for _ in range(self.rng.randrange(1, 9))}
            known = self.rng.sample(sorted(held), min(len(held), self.rng.randrange(6)))
            keys = [*fresh, *known]
            self.rng.shuffle(keys)
            writes = [maker.write(key, fresh.get(key) or held[key]) for key in keys]
            outcomes = await backend.put(writes)
            expected = [Outcome.OK if key in fresh else Outcome.EXISTS for key in keys]
            assert list(outcomes) == expected, f"put: {outcomes}, expected {expected}"
            held.update(fresh)
            keys = [*self.rng.sample(sorted(held), len(held) // 2 + 1), *(maker.key() for _ in range(4))]
            self.rng.shuffle(keys)
            assert await self.get_all(backend, keys) == [held.get(key) for key in keys], (
                "answers of another block: keep the order of the batch"
            )
            assert list(await backend.exists(keys)) == [key in held for key in keys], (
                "exists answers of another block: keep the order of the batch"
            )

    @in_loop
    async def test_first_writer_wins(self) -> None:
        """A second put of a key is EXISTS and changes nothing."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        key, first = maker.key(), maker.payload()
        await self.put_all(backend, {key: first})
        for length in (self.payload_bytes_max, 100):
            (outcome,) = await backend.put([maker.write(key, maker.payload(length))])
            assert outcome is Outcome.EXISTS, f"second put: {outcome!r}; return EXISTS for a key that is present"
        assert await self.get_all(backend, [key]) == [first], (
            "a second put replaced the first: put only if the key is absent, and return EXISTS"
        )

    @in_loop
    async def test_same_key_twice_in_a_batch(self) -> None:
        """One of two puts of a key in one batch wins; duplicate keys in gets and deletes are allowed."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        key, payloads = maker.key(), [maker.payload(), maker.payload(5000)]
        outcomes = await backend.put([maker.write(key, payload) for payload in payloads])
        assert sorted(outcomes) == [Outcome.OK, Outcome.EXISTS], f"one key twice in a put: {outcomes}"
        winner = payloads[list(outcomes).index(Outcome.OK)]
        assert await self.get_all(backend, [key, key]) == [winner, winner], (
            "not the block that was OK: the first writer wins"
        )
        assert list(await backend.exists([key, key])) == [True, True], "one key twice in exists"
        deleted = list(await backend.delete([key, key]))
        if self.deletes:
            assert deleted in ([False, True], [True, False]), (
                f"one key twice in a delete: {deleted}; return True once, for the block that existed"
            )
            assert await self.get_all(backend, [key]) == [None], (
                "deleted, and still there: delete must end before it returns True"
            )

    @in_loop
    async def test_empty_batches(self) -> None:
        """An empty batch has no outcomes."""
        backend = await self.opened_backend()
        for call in (backend.put([]), backend.get_into([]), backend.exists([]), backend.delete([])):
            assert list(await call) == [], "outcomes for an empty batch"
        await backend.quarantine([])
        backend.touch([])

    @in_loop
    async def test_keys_of_all_lengths_and_bytes(self) -> None:
        """Keys are opaque: they consist of 1 to 64 arbitrary bytes, and keys with a common prefix are different."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        keys = {bytes([byte]) for byte in range(256)}
        keys |= {b"k" * length for length in range(1, KEY_BYTES_MAX + 1)}
        keys |= {b"\0" * KEY_BYTES_MAX, b"\xff" * KEY_BYTES_MAX, b"..", b"../x", b"a/b", b"a\nb", b"A", b"a", b"\0a"}
        keys |= {b"ab".hex().encode(), b"ab"}
        values = {key: maker.payload(self.rng.randrange(1, 300)) for key in sorted(keys)}
        await self.put_all(backend, values)
        assert await self.get_all(backend, list(values)) == list(values.values()), (
            "a key stands for another: use the whole key, and encode it reversibly"
        )
        if self.scans:
            assert set(await self.scanned(backend)) == set(values), "a scan yields other keys than were put"

    @in_loop
    async def test_buffers_are_the_callers_again_after_a_put(self) -> None:
        """Writes into the caller's buffers after a put do not change the record; a put only reads them."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload() for _ in range(8)}
        writes = [maker.write(key, payload) for key, payload in values.items()]
        before = [[bytes(buffer) for buffer in write.buffers] for write in writes]
        await backend.put(writes)
        for write, was in zip(writes, before, strict=True):
            assert [bytes(buffer) for buffer in write.buffers] == was, (
                "a put changed the caller's buffers: copy before you change bytes"
            )
            for buffer in write.buffers:
                buffer[:] = bytes(buffer.nbytes)
        assert await self.get_all(backend, list(values)) == list(values.values()), (
            "a put kept the caller's buffers: copy what outlives the call"
        )

    @in_loop
    async def test_read_only_buffers_can_be_put(self) -> None:
        """A put accepts read-only buffers."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        key, payload = maker.key(), maker.payload(8192)
        write = maker.write(key, payload)
        write.buffers = [buffer.toreadonly() for buffer in write.buffers]
        assert list(await backend.put([write])) == [Outcome.OK], (
            "read-only buffers were refused: take any object with the buffer protocol"
        )
        assert await self.get_all(backend, [key]) == [payload], "the payload is another"

    @in_loop
    async def test_deleted_blocks_are_gone_and_can_be_put_again(self) -> None:
        """A delete removes exactly its keys; the same key can then be put with other bytes."""
        backend = await self.opened_backend()
        if not self.deletes:
            return
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(5000) for _ in range(12)}
        await self.put_all(backend, values)
        keys = list(values)
        stranger = maker.key()
        deleted = list(await backend.delete([*keys[:6], stranger]))
        assert deleted == [True] * 6 + [False], f"a delete returned {deleted}: return for each key whether it existed"
        expected = [None] * 6 + [values[key] for key in keys[6:]]
        assert await self.get_all(backend, keys) == expected, "a delete took other blocks than it should"
        again = {key: maker.payload(7000) for key in keys[:6]}
        await self.put_all(backend, again)
        assert await self.get_all(backend, keys[:6]) == list(again.values()), "an old value came back"

    @in_loop
    async def test_quarantined_blocks_are_misses(self) -> None:
        """A quarantined record is a miss, its neighbours are still found, and the key can be put again."""
        backend = await self.opened_backend()
        if not self.deletes:
            return
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(5000) for _ in range(6)}
        await self.put_all(backend, values)
        bad, *good = values
        await backend.quarantine([bad, maker.key()])
        assert await self.get_all(backend, [bad]) == [None], (
            "a quarantined block can be read: move or delete the record"
        )
        assert list(await backend.exists([bad])) == [False], "a quarantined block exists"
        assert await self.get_all(backend, good) == [values[key] for key in good], "its neighbours are gone"
        if self.scans:
            assert set(await self.scanned(backend)) == set(good), "a scan yields a quarantined block"
        await self.put_all(backend, {bad: maker.payload(100)})

    @in_loop
    async def test_scan_yields_every_block_once(self) -> None:
        """A scan yields every block once, with a size, and nothing else, also after a probe."""
        backend = await self.opened_backend()
        if not self.scans:
            return
        assert await self.scanned(backend) == {}, (
            "a scan of an empty medium yields something: yield only blocks of this namespace"
        )
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(self.rng.randrange(1, 20_000)) for _ in range(150)}
        await self.put_all(backend, values)
        await backend.probe()
        removed = self.rng.sample(sorted(values), 30) if self.deletes else []
        await backend.delete(removed)
        found = await self.scanned(backend)
        assert set(found) == set(values) - set(removed), (
            "a scan yields other blocks than there are: yield those put and not deleted"
        )
        for key, size in found.items():
            assert size >= len(values[key]), (
                f"a scan says {size} bytes for a payload of {len(values[key])}: give the length of the whole record"
            )

    @in_loop
    async def test_statistics_count_blocks_and_bytes(self) -> None:
        """If a backend counts blocks, the count is exact, and the bytes are at least those of the payloads."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(6000) for _ in range(10)}
        await self.put_all(backend, values)
        stats = backend.stats()
        assert stats.blocks in (0, 10), f"{stats.blocks} blocks counted, 10 put"
        assert not stats.blocks or stats.used_bytes >= 60_000, f"{stats.used_bytes} bytes counted for 60000"
        if stats.blocks and self.deletes:
            await backend.delete(list(values))
            stats = backend.stats()
            assert (stats.blocks, stats.used_bytes) == (0, 0), f"all deleted, and still counted: {stats}"

    @in_loop
    async def test_a_miss_reports_nothing_filled(self) -> None:
        """A miss leaves ``filled_bytes`` unchanged, so that old content of a buffer never counts as a record."""
        backend = await self.opened_backend()
        target = self.maker(backend).target(self.maker(backend).key())
        read = RecordRead(target.key, target.read.buffers)
        await backend.get_into([read])
        assert read.filled_bytes == 0, f"filled_bytes is {read.filled_bytes} after a miss"


class BackendLifecycleTests(BackendHarness):
    """Open, close, restart and capacity."""

    @in_loop
    async def test_close_is_idempotent(self) -> None:
        """A backend can be closed twice, and without having been opened."""
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
        """Calls that run during a close end with outcomes or a ``BackendError``; no buffer is written later."""
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
        assert not running, f"{len(running)} calls did not end after close: close must end them"
        for target in targets:
            target.fill()
        for call in done:
            error = call.exception()
            assert error is None or isinstance(error, BackendError), (
                f"a call raised {error!r} when the backend closed: raise a BackendError"
            )
        assert all(target.untouched for target in targets), (
            "a buffer was written after its call had returned: await the transfer, also when cancelled"
        )

    @in_loop
    async def test_blocks_outlive_a_restart(self) -> None:
        """After a close and an open, put blocks exist and deleted ones do not, also in a scan."""
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
        assert await self.get_all(again, list(values)) == expected, (
            "other blocks than before the restart: publish whole records before put returns"
        )
        if self.scans:
            assert set(await self.scanned(again)) == set(values) - set(gone), (
                "a scan after the restart yields other blocks than get_into finds: list the medium"
            )
        outcomes = await again.put([maker.write(key, maker.payload(50)) for key in list(values)[10:20]])
        assert list(outcomes) == [Outcome.EXISTS] * 10, (
            f"put of blocks from before the restart: {outcomes}; return EXISTS for a key on the medium"
        )

    @in_loop
    async def test_namespaces_do_not_meet(self) -> None:
        """A backend with another namespace on the same medium finds no block of the first, and changes none."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(5000) for _ in range(8)}
        await self.put_all(backend, values)
        other = await self.restarted(backend, Namespace({"suite": "another"}))
        if other is None:
            return
        assert list(await other.exists(list(values))) == [False] * 8, (
            "a block of another namespace exists: put namespace.hex into the name"
        )
        if self.scans:
            assert await self.scanned(other) == {}, "a scan yields blocks of another namespace: filter by namespace.hex"
        others = self.maker(other, Namespace({"suite": "another"}))
        outcomes = await other.put([others.write(key, others.payload(600)) for key in values])
        assert list(outcomes) == [Outcome.OK] * 8, f"put in another namespace: {outcomes}"
        await other.delete(list(values)[:4])
        first = await self.restarted(other)
        assert first is not None, "could be opened once, and not again"
        assert await self.get_all(first, list(values)) == list(values.values()), (
            "another namespace changed blocks: put namespace.hex into the name for deletes, too"
        )

    @in_loop
    async def test_capacity_is_kept(self) -> None:
        """The capacity is never exceeded; every eviction is reported, and the remaining blocks are intact."""
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
        assert len(removed) == len(set(removed)), "a removal was reported twice: call the listener once for each block"
        assert removed or refused, "64 blocks were put into room for 16, and nothing left and nothing was refused"
        got = await self.get_all(backend, list(values))
        for (key, payload), back in zip(values.items(), got, strict=True):
            assert back == (None if key in removed else payload), f"key {key.hex()} is not what its eviction says"

    @in_loop
    async def test_a_block_in_use_outlives_one_that_is_not(self) -> None:
        """A block that is read repeatedly is not the first to be evicted from a full backend."""
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

    async def _closed(self) -> Backend:
        backend = await self.opened_backend()
        await backend.close()
        return backend

    async def _settled(self, backend: Backend, values: dict[BlockKey, bytes], removed: list[BlockKey]) -> None:
        """Wait until exactly the blocks that were put and not reported as removed exist; eviction may lag."""
        keys = list(values)
        deadline = asyncio.get_running_loop().time() + self.time_limit_s / 2
        while list(await backend.exists(keys)) != [key not in removed for key in keys]:
            assert asyncio.get_running_loop().time() < deadline, (
                "blocks are gone whose removal was not reported: call the removal listener"
            )
            await asyncio.sleep(0.001)


class BackendFailureTests(BackendHarness):
    """A medium that fails, wholly or for one key."""

    @in_loop
    async def test_a_medium_that_fails_is_not_an_absent_block(self) -> None:
        """While the medium fails, ``exists`` and ``probe`` raise and transfers fail; later all blocks are found."""
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
        """While the medium fails for one key, the others exist and can be read; its own presence is unknown."""
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
                assert all(answers[key] is (key in values) for key in keys[1:]), (
                    f"other keys are not answered: {answers}; a failure concerns its own key"
                )
            reads = [maker.target(key).read for key in values]
            bad_outcome, *outcomes = await backend.get_into(reads)
            assert bad_outcome.is_failure, f"a block that can't be read is {bad_outcome}"
            assert set(outcomes) == {Outcome.OK}, f"others can't be read: {outcomes}"
        finally:
            await self.mend_medium(backend)
        assert list(await backend.exists([bad])) == [True], "a key that failed is lost"

    async def _fails(self, call: object, what: str) -> None:
        try:
            outcomes = await call  # type: ignore[misc]
        except BackendError:
            return
        assert all(outcome.is_failure for outcome in outcomes), f"{what}: {outcomes}"


_LATE_S = 0.05
"""Time to watch buffers that must not be written; a late write can only be detected by waiting."""


class BackendConcurrencyTests(BackendHarness):
    """Concurrent calls on the same keys, cancelled at any point."""

    @in_loop
    async def test_one_batch_of_many_blocks(self) -> None:
        """A batch may be much longer than the concurrency of a medium."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(self.rng.randrange(1, 5000)) for _ in range(500)}
        await self.put_all(backend, values)
        assert await self.get_all(backend, list(values)) == list(values.values()), "a long batch came back different"

    @in_loop
    async def test_many_batches_at_once(self) -> None:
        """While many batches put, get and delete the same keys, a get returns a whole value of its key or none."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        written: dict[BlockKey, set[bytes]] = {maker.key(): set() for _ in range(12)}
        await asyncio.gather(*(self._busy(backend, maker, written) for _ in range(16)))
        keys = list(written)
        got = await self.get_all(backend, keys)
        assert await self.get_all(backend, keys) == got, "two gets in a row see different blocks"
        assert list(await backend.exists(keys)) == [back is not None for back in got], (
            "exists contradicts get_into: look both up in the same place"
        )

    @in_loop
    async def test_of_many_first_writers_one_wins(self) -> None:
        """Exactly one of several concurrent puts of a key is OK, and its bytes are stored."""
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
        assert counts == [1] * len(keys), f"writers with OK by key: {counts}; publish atomically, so that one wins"
        got = await self.get_all(backend, keys)
        assert got == [winners[key][0] for key in keys], "the bytes are not those of the writer that won"

    @in_loop
    async def test_gets_beside_a_put_see_all_or_nothing(self) -> None:
        """A partly written record is never visible."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        for _ in range(8):
            values = {maker.key(): maker.payload() for _ in range(4)}
            put = asyncio.ensure_future(self.put_all(backend, values))
            while not put.done():
                got = await self.get_all(backend, list(values))
                assert set(got) <= {None, *values.values()}, (
                    "a get saw something that was not put: publish a record whole or not at all"
                )
                await asyncio.sleep(0)
            await put
            assert await self.get_all(backend, list(values)) == list(values.values()), "put, and not there"

    @in_loop
    async def test_no_buffer_is_written_after_a_cancelled_get(self) -> None:
        """After a get has ended, cancelled or not, its buffers are never written again."""
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
            # Watching the header and payload of every fourth block is enough, and limits memory.
            watched.extend(targets[::4])
            # Other calls use the backend at the same time, to expose unfinished work.
            assert list(await backend.exists([targets[0].key])) == [True], "a cancelled get lost a block"
        await asyncio.sleep(_LATE_S)
        await backend.close()
        late = sum(not target.untouched for target in watched)
        assert not late, (
            f"{late} of {len(watched)} buffers written after their get had ended: wait for the medium when cancelled"
        )

    @in_loop
    async def test_no_buffer_is_read_after_a_cancelled_put(self) -> None:
        """After a put has ended, changes to its buffers do not reach the medium: it has the original bytes or none."""
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
        """After many concurrent cancelled calls of all kinds, everything still works."""
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
                assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS}, f"concurrent put: {outcomes}"
            elif what < 0.8 or not self.deletes:
                for key, back in zip(keys, await self.get_all(backend, keys), strict=True):
                    assert back is None or back in written[key], (
                        "a get returned a value that was never put under its key"
                    )
            elif what < 0.9:
                await backend.delete(keys)
            else:
                await backend.exists(keys)

    async def _cancelled(self, call: Awaitable[object]) -> Sequence[Outcome] | None:
        """Start a call, cancel it at a random point (sometimes twice), wait for its end; return its result, if any."""
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
        assert not running, "a cancelled call did not end: give each wait a deadline"
        if task.cancelled():
            return None
        result = task.result()
        return result if isinstance(result, list) else None

    async def _all_whole(self, backend: Backend, values: dict[BlockKey, bytes]) -> None:
        """Check that every key holds its verified value or nothing."""
        got = await self.get_all(backend, list(values))
        for (key, payload), back in zip(values.items(), got, strict=True):
            assert back in (None, payload), f"key {key.hex()} holds bytes that were written after its put had ended"
        if self.scans:
            there = {key for key, back in zip(values, got, strict=True) if back is not None}
            assert set(await self.scanned(backend)) == there, (
                "a scan yields other blocks than get_into finds: list whole records of this namespace alone"
            )


class BackendTests(BackendValueTests, BackendLifecycleTests, BackendFailureTests, BackendConcurrencyTests):
    """Contract of every backend, in about thirty tests.

    Subclass it in a test module, under a name that pytest collects, and create your backend::

        class TestMyBackend(BackendTests):
            async def make_backend(self) -> Backend:
                return MyBackend(MyConfig(url="…"))

    Override further methods for more checks: ``reopen`` if blocks outlive a ``close``, ``make_small_backend`` if there
    is a capacity, ``break_medium`` and ``mend_medium`` if a test can make the medium fail. Set ``scans`` or ``deletes``
    to False if the medium cannot do it. Tests that do not apply pass.

    Plain pytest runs it, without a plugin. To use fixtures such as ``tmp_path``, store them on ``self`` in an autouse
    fixture of the subclass. A failure shows the seed that repeats it.
    """
