"""The part of the backend suite that is about values: what was put is what is got, block by block."""

from __future__ import annotations

from kvstore.backends.base import RecordRead
from kvstore.testing.backend_harness import BackendHarness, in_loop
from kvstore.types import KEY_BYTES_MAX, BlockKey, Outcome

__all__ = ["BackendValueTests"]


class BackendValueTests(BackendHarness):
    """Batches of puts, gets, deletes and scans, one after the other."""

    @in_loop
    async def test_round_trip_of_all_lengths(self) -> None:
        """Payloads from one byte to a whole slot come back byte by byte, from buffers longer than they are."""
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
        """A record fits into buffers that are exactly as long, and nothing is written behind them."""
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
    async def test_record_longer_than_buffers_is_corrupt(self) -> None:
        """A record that does not fit is CORRUPT, and nothing is written outside of the buffers."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        key = maker.key()
        await self.put_all(backend, {key: maker.payload()})
        target = maker.target(key, self.payload_bytes_max - 4096)
        (outcome,) = await backend.get_into([target.read])
        assert outcome is Outcome.CORRUPT, f"{outcome!r} for a record that is longer than the buffers"
        assert target.guards_intact, "bytes were written outside of the buffers"

    @in_loop
    async def test_buffers_of_all_kinds(self) -> None:
        """Memory of any origin and alignment will do, the payload in one buffer or several."""
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
        """What nobody put is a MISS and does not exist; no call raises for it."""
        backend = await self.opened_backend()
        keys = [self.maker(backend).key() for _ in range(20)]
        assert await self.get_all(backend, keys) == [None] * 20, "a key that nobody put was found"
        assert list(await backend.exists(keys)) == [False] * 20, "a key that nobody put exists"
        assert list(await backend.delete(keys)) == [False] * 20, "a key that nobody put was deleted"
        await backend.quarantine(keys)
        backend.touch(keys)

    @in_loop
    async def test_each_block_of_a_mixed_batch_has_its_own_outcome(self) -> None:
        """Hits and misses, new and known keys, in random order in one batch: each answer belongs to its block."""
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
            assert await self.get_all(backend, keys) == [held.get(key) for key in keys], "answers of another block"
            assert list(await backend.exists(keys)) == [key in held for key in keys], "exists answers of another block"

    @in_loop
    async def test_first_writer_wins(self) -> None:
        """A second put of a key is EXISTS and changes nothing."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        key, first = maker.key(), maker.payload()
        await self.put_all(backend, {key: first})
        for length in (self.payload_bytes_max, 100):
            (outcome,) = await backend.put([maker.write(key, maker.payload(length))])
            assert outcome is Outcome.EXISTS, f"second put: {outcome!r}"
        assert await self.get_all(backend, [key]) == [first], "a second put replaced the first"

    @in_loop
    async def test_same_key_twice_in_a_batch(self) -> None:
        """Of two puts of a key in one batch one wins; gets and deletes of a key twice are fine."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        key, payloads = maker.key(), [maker.payload(), maker.payload(5000)]
        outcomes = await backend.put([maker.write(key, payload) for payload in payloads])
        assert sorted(outcomes) == [Outcome.OK, Outcome.EXISTS], f"one key twice in a put: {outcomes}"
        winner = payloads[list(outcomes).index(Outcome.OK)]
        assert await self.get_all(backend, [key, key]) == [winner, winner], "not the block that was OK"
        assert list(await backend.exists([key, key])) == [True, True], "one key twice in exists"
        deleted = list(await backend.delete([key, key]))
        if self.deletes:
            assert sorted(deleted) == [False, True], f"one key twice in a delete: {deleted}"
            assert await self.get_all(backend, [key]) == [None], "deleted, and still there"

    @in_loop
    async def test_empty_batches(self) -> None:
        """A batch of nothing has no outcomes."""
        backend = await self.opened_backend()
        for call in (backend.put([]), backend.get_into([]), backend.exists([]), backend.delete([])):
            assert list(await call) == [], "outcomes for an empty batch"
        await backend.quarantine([])
        backend.touch([])

    @in_loop
    async def test_keys_of_all_lengths_and_bytes(self) -> None:
        """Keys are opaque: any bytes, 1 to 64 of them, and keys that begin alike are different keys."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        keys = {bytes([byte]) for byte in range(256)}
        keys |= {b"k" * length for length in range(1, KEY_BYTES_MAX + 1)}
        keys |= {b"\0" * KEY_BYTES_MAX, b"\xff" * KEY_BYTES_MAX, b"..", b"../x", b"a/b", b"a\nb", b"A", b"a", b"\0a"}
        keys |= {b"ab".hex().encode(), b"ab"}
        values = {key: maker.payload(self.rng.randrange(1, 300)) for key in sorted(keys)}
        await self.put_all(backend, values)
        assert await self.get_all(backend, list(values)) == list(values.values()), "a key stands for another"
        if self.scans:
            assert set(await self.scanned(backend)) == set(values), "a scan yields other keys than were put"

    @in_loop
    async def test_buffers_are_the_callers_again_after_a_put(self) -> None:
        """What the caller writes into its buffers after a put does not change the record; a put only reads them."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        values = {maker.key(): maker.payload() for _ in range(8)}
        writes = [maker.write(key, payload) for key, payload in values.items()]
        before = [[bytes(buffer) for buffer in write.buffers] for write in writes]
        await backend.put(writes)
        for write, was in zip(writes, before, strict=True):
            assert [bytes(buffer) for buffer in write.buffers] == was, "a put changed the caller's buffers"
            for buffer in write.buffers:
                buffer[:] = bytes(buffer.nbytes)
        assert await self.get_all(backend, list(values)) == list(values.values()), "a put kept the caller's buffers"

    @in_loop
    async def test_read_only_buffers_can_be_put(self) -> None:
        """A put needs no right to write into its buffers."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        key, payload = maker.key(), maker.payload(8192)
        write = maker.write(key, payload)
        write.buffers = [buffer.toreadonly() for buffer in write.buffers]
        assert list(await backend.put([write])) == [Outcome.OK], "read-only buffers were refused"
        assert await self.get_all(backend, [key]) == [payload], "the payload is another"

    @in_loop
    async def test_deleted_blocks_are_gone_and_can_be_put_again(self) -> None:
        """A delete takes exactly its keys; the same key can then hold something else."""
        backend = await self.opened_backend()
        if not self.deletes:
            return
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(5000) for _ in range(12)}
        await self.put_all(backend, values)
        keys = list(values)
        stranger = maker.key()
        assert list(await backend.delete([*keys[:6], stranger])) == [True] * 6 + [False], "wrong answers to a delete"
        expected = [None] * 6 + [values[key] for key in keys[6:]]
        assert await self.get_all(backend, keys) == expected, "a delete took other blocks than it should"
        again = {key: maker.payload(7000) for key in keys[:6]}
        await self.put_all(backend, again)
        assert await self.get_all(backend, keys[:6]) == list(again.values()), "an old value came back"

    @in_loop
    async def test_quarantined_blocks_are_misses(self) -> None:
        """A record that was set aside is not found again, its neighbours are, and the key can be put anew."""
        backend = await self.opened_backend()
        if not self.deletes:
            return
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(5000) for _ in range(6)}
        await self.put_all(backend, values)
        bad, *good = values
        await backend.quarantine([bad, maker.key()])
        assert await self.get_all(backend, [bad]) == [None], "a quarantined block can be read"
        assert list(await backend.exists([bad])) == [False], "a quarantined block exists"
        assert await self.get_all(backend, good) == [values[key] for key in good], "its neighbours are gone"
        if self.scans:
            assert set(await self.scanned(backend)) == set(good), "a scan yields a quarantined block"
        await self.put_all(backend, {bad: maker.payload(100)})

    @in_loop
    async def test_scan_yields_exactly_what_there_is(self) -> None:
        """A scan names every block once, with a size, and nothing else; a probe leaves no trace in it."""
        backend = await self.opened_backend()
        if not self.scans:
            return
        assert await self.scanned(backend) == {}, "a scan of an empty medium yields something"
        maker = self.maker(backend)
        values = {maker.key(): maker.payload(self.rng.randrange(1, 20_000)) for _ in range(150)}
        await self.put_all(backend, values)
        await backend.probe()
        removed = self.rng.sample(sorted(values), 30) if self.deletes else []
        await backend.delete(removed)
        found = await self.scanned(backend)
        assert set(found) == set(values) - set(removed), "a scan yields other blocks than there are"
        for key, size in found.items():
            assert size >= len(values[key]), f"a scan says {size} bytes for a payload of {len(values[key])}"

    @in_loop
    async def test_statistics_count_blocks_and_bytes(self) -> None:
        """Where a backend counts, it counts right: blocks held, and bytes no fewer than their payloads."""
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
        """After a miss ``filled_bytes`` is what it was, so that old content of a buffer is never taken for a record."""
        backend = await self.opened_backend()
        target = self.maker(backend).target(self.maker(backend).key())
        read = RecordRead(target.key, target.read.buffers)
        await backend.get_into([read])
        assert read.filled_bytes == 0, f"filled_bytes is {read.filled_bytes} after a miss"
