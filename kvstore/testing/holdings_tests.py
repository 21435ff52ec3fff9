"""The contract of a backend's holdings as a test suite, to be subclassed."""

from __future__ import annotations

import contextlib
import pkgutil
import time
from collections.abc import AsyncIterator
from typing import ClassVar, Final

from kvstore.backends.base import Backend, RecordRead, RecordWrite
from kvstore.backends.holdings import Holdings
from kvstore.codec.record import HEADER_BYTES, RecordCodec, decode_header
from kvstore.errors import RecordError
from kvstore.namespace import Namespace
from kvstore.testing.backend_harness import BackendHarness, in_loop
from kvstore.types import KEY_BYTES_MAX, BlockInfo, BlockKey, NamespaceInfo, Outcome, RemovalCause

_OTHER: Final = Namespace({"suite": "holdings", "model": "other"})

_HOSTILE_KEYS: Final = (
    b"\0", b"\xff", b"/", b"..", b"a:0", b"*", b"\r\n$1\r\n", b"../../../etc/passwd", b"%2e%2e", b" " * 7,
    b"\0" * KEY_BYTES_MAX, b"\xff" * KEY_BYTES_MAX,
)  # fmt: skip
"""Keys with a meaning in paths, patterns and protocols, and of the minimum and maximum length."""

_CLOCK_S: Final = 60.0
"""Tolerance for a server's clock."""


class HoldingsTests(BackendHarness):
    """Requirements of the admin tools: complete listing, whole records, removal of exactly the named blocks.

    Subclass it like :class:`~kvstore.testing.BackendTests`. ``reopen`` is required, because admin tools open the medium
    beside or after the engine. Set ``lists_namespaces`` to False if the backend has no ``namespaces``, and ``shares``
    to False if only one backend at a time can have the medium open. Set ``erases`` to False if the bytes of a removed
    block stay readable at their location, as in a pack until the whole pack is removed.
    """

    payload_bytes_max: ClassVar[int] = 8192
    lists_namespaces: ClassVar[bool] = True
    shares: ClassVar[bool] = True
    erases: ClassVar[bool] = True

    @in_loop
    async def test_every_block_is_listed_once(self) -> None:
        """The listing has all namespaces, and all blocks with key, record length and a plausible last use."""
        begun = time.time()
        backend, stored = await self._filled(_HOSTILE_KEYS)
        async with self._holdings(backend) as holdings:
            if self.lists_namespaces:
                found = await holdings.namespaces()
                assert found is not None, "namespaces is None: return a list, or set lists_namespaces to False"
                assert {each.hex for each in found} == {self.namespace.hex, _OTHER.hex}, (
                    f"namespaces: {found}; list each namespace of the medium once"
                )
            blocks = await self._scanned(holdings)
        assert blocks, (
            "scan: no block; admin tools make a backend of this class and configuration, and read the same medium"
        )
        assert sorted(block.key for block in blocks) == sorted(stored), (
            "scan: keys are missing, repeated or altered; yield every block once, with its key as it was put"
        )
        for block in blocks:
            payload_bytes = len(stored[block.key])
            assert block.size_bytes >= HEADER_BYTES + payload_bytes, f"{block}: size_bytes counts header and payload"
            assert not block.used_at or begun - _CLOCK_S < block.used_at < time.time() + _CLOCK_S, (
                f"{block}: used_at is a Unix time in seconds, or 0 if unknown"
            )

    @in_loop
    async def test_records_are_read_whole(self) -> None:
        """Every record verifies under its namespace and key, with the payload that was stored."""
        backend, stored = await self._filled(_HOSTILE_KEYS)
        async with self._holdings(backend) as holdings:
            blocks = await self._scanned(holdings)
            read = await self._verified(holdings, blocks)
        assert read == stored, "records differ from the stored ones: return header and payload, from the first byte"

    @in_loop
    async def test_named_blocks_are_looked_up(self) -> None:
        """Of some keys, those on the medium are found, in their own namespace; removed and unknown ones are not."""
        backend, stored = await self._filled(_HOSTILE_KEYS)
        absent = self.maker(backend).key()
        async with self._holdings(backend) as holdings:
            wanted = [*stored, absent, b"of another namespace"]
            assert await holdings.present(self._info(), wanted) == set(stored), (
                "present: answer for the namespace and keys asked"
            )
            assert await holdings.present(self._info(_OTHER), wanted) == {b"of another namespace"}, (
                "present found blocks of another namespace, or missed one: look up each key in the namespace given"
            )
            gone = next(iter(stored))
            await holdings.remove(
                self._info(),
                [block for block in await self._scanned(holdings) if block.key == gone],
                RemovalCause.EXPIRED,
            )
            assert await holdings.present(self._info(), [gone]) == set(), (
                "a removed block is present: remove it from the medium and from what you keep"
            )
            if self.lists_namespaces:
                described = await holdings.described()
                assert {each.hex for each in described or ()} == {self.namespace.hex, _OTHER.hex}, f"{described}"

    @in_loop
    async def test_looking_changes_nothing(self) -> None:
        """A running engine finds all its blocks after an inspection."""
        if not self.shares:
            return
        backend, stored = await self._filled()
        engine = await self.opened_backend(await self._again(backend))
        async with self._holdings(backend) as holdings:
            blocks = await self._scanned(holdings)
            assert set(await self._verified(holdings, blocks)) == set(stored), (
                "read: return each record that scan listed"
            )
            stale = await holdings.stale_items()
        assert not stale, f"stale on a clean medium: {stale}; list only items that no engine will use again"
        assert await self.get_all(engine, list(stored)) == list(stored.values()), (
            "the inspection changed a block: open the medium for reading, and take no lock"
        )

    @in_loop
    async def test_an_engine_may_store_and_remove_meanwhile(self) -> None:
        """Blocks stored before the scan are listed; every block is read intact or is gone."""
        if not self.shares:
            return
        backend, stored = await self._filled()
        engine = await self.opened_backend(await self._again(backend))
        maker, more = self.maker(engine), {}
        gone, kept = list(stored)[:2], list(stored)[2:]
        async with self._holdings(backend) as holdings:
            blocks: list[BlockInfo] = []
            async with contextlib.aclosing(holdings.scan(self._info())) as pages:
                async for page in pages:
                    blocks += page
                    more[key := maker.key()] = maker.payload(100)
                    await self.put_all(engine, {key: more[key]})
            if self.deletes:
                await engine.delete(gone)
            assert set(stored) <= {block.key for block in blocks} <= set(stored) | set(more), (
                "scan: a block from before the scan is missing, or one was never stored: list each block once"
            )
            read = await self._verified(holdings, blocks)
        assert set(kept) <= set(read) and read.items() <= (stored | more).items(), (
            "a block was read wrong or not at all"
        )
        assert not (self.deletes and self.erases and set(gone) & set(read)), (
            "a deleted block was read: return None for it, or set erases to False"
        )

    @in_loop
    async def test_damage_is_read_as_damage_and_taken_away_alone(self) -> None:
        """A record with a flipped bit does not verify; once removed, engines miss it and find all others."""
        backend, stored = await self._filled(close=False)
        maker, bad = self.maker(backend), b"damaged"
        write = maker.write(bad, maker.payload())
        write.buffers[-1][100] ^= 1
        assert list(await backend.put([write])) == [Outcome.OK]
        await backend.close()
        async with self._holdings(backend) as holdings:
            (block,) = [each for each in await self._scanned(holdings) if each.key == bad]
            assert await self._verified(holdings, [block]) == {}, (
                "a damaged record verifies: return the bytes of the medium unchanged"
            )
            if not self.deletes:
                return
            assert await holdings.remove(self._info(), [block], RemovalCause.CORRUPT) == 1, (
                "remove: return the number of blocks removed"
            )
        assert set(await self._found(backend, [*stored, bad])) == set(stored), (
            "remove: take the named block, and no other"
        )

    @in_loop
    async def test_removal_takes_the_named_blocks_and_no_others(self) -> None:
        """Removed blocks are counted, and engines miss them afterwards."""
        backend, stored = await self._filled()
        if not self.deletes:
            return
        async with self._holdings(backend) as holdings:
            blocks = sorted(await self._scanned(holdings), key=lambda block: block.key)
            assert await holdings.remove(self._info(), blocks[:3], RemovalCause.EXPIRED) == 3, (
                "remove: return the number of blocks removed"
            )
            left = {block.key for block in await self._scanned(holdings)}
            assert left == {block.key for block in blocks[3:]}, "remove: take the named blocks, and no other"
            if self.erases:
                assert await self._verified(holdings, blocks[:3]) == {}, (
                    "a removed block was read: return None for it, or set erases to False"
                )
        assert set(await self._found(backend, list(stored))) == left, (
            "an engine finds other blocks than scan: remove both alike"
        )

    @in_loop
    async def test_a_namespace_is_removed_whole_and_alone(self) -> None:
        """Its blocks are counted, it is no longer listed, and the other namespace keeps all of its blocks."""
        backend, stored = await self._filled()
        if not self.deletes:
            return
        async with self._holdings(backend) as holdings:
            assert await holdings.remove_namespace(self._info()) == len(stored)
            assert await self._scanned(holdings) == []
            if self.lists_namespaces:
                assert [each.hex for each in await holdings.namespaces() or ()] == [_OTHER.hex]
            assert len(await self._scanned(holdings, _OTHER)) == 1
        assert await self._found(backend, list(stored)) == []

    @in_loop
    async def test_held_namespace_is_left_alone(self) -> None:
        """If the medium shows holders, nothing is removed from a held namespace."""
        if not self.shares:
            return
        backend, stored = await self._filled()
        engine = await self.opened_backend(await self._again(backend))
        async with self._holdings(backend) as holdings:
            if not holdings.knows_holders:
                return
            held = {each.hex: each.holder for each in await holdings.namespaces() or ()}
            assert held[self.namespace.hex] and not held[_OTHER.hex], f"holders: {held}"
            await self.put_all(engine, {b"its own": b"x"})
            (own,) = [block for block in await self._scanned(holdings) if block.key == b"its own"]
            assert await holdings.remove(self._info(), [own], RemovalCause.CORRUPT) == 0
        assert await self.get_all(engine, [*stored, b"its own"]) == [*stored.values(), b"x"]

    @in_loop
    async def test_a_scan_may_be_left(self) -> None:
        """A scan may be closed after its first page; the next scan is complete. Closing holdings is idempotent."""
        backend, stored = await self._filled()
        async with self._holdings(backend) as holdings:
            pages = holdings.scan(self._info())
            await anext(pages)
            await pages.aclose()
            assert {block.key for block in await self._scanned(holdings)} == set(stored)
            await holdings.close()

    @contextlib.asynccontextmanager
    async def _holdings(self, backend: Backend) -> AsyncIterator[Holdings]:
        kind: type[Holdings] = pkgutil.resolve_name(backend.holdings_type)
        holdings = kind(type(backend), backend.config)
        try:
            await holdings.open()
            yield holdings
        finally:
            await holdings.close()

    async def _filled(
        self, keys: tuple[BlockKey, ...] = (), *, close: bool = True
    ) -> tuple[Backend, dict[BlockKey, bytes]]:
        """Return a closed backend over a medium with two namespaces, and the blocks of the first."""
        backend = await self.opened_backend()
        maker = self.maker(backend)
        lengths = [self.rng.choice([1, 255, 4096, self.payload_bytes_max]) for _ in range(len(keys) or 12)]
        stored = {
            key: maker.payload(length)
            for key, length in zip(keys or [maker.key() for _ in lengths], lengths, strict=True)
        }
        await self.put_all(backend, stored)
        await backend.close()
        other = await self.opened_backend(await self._again(backend), _OTHER)
        maker = self.maker(other, _OTHER)
        write: RecordWrite = maker.write(b"of another namespace", maker.payload())
        assert list(await other.put([write])) == [Outcome.OK]
        await other.close()
        if not close:
            backend = await self.opened_backend(await self._again(backend))
        return backend, stored

    async def _again(self, backend: Backend) -> Backend:
        again = await self.reopen(backend)
        assert again is not None, "HoldingsTests needs reopen: admin tools open the medium beside the engine"
        return again

    async def _scanned(self, holdings: Holdings, namespace: Namespace | None = None) -> list[BlockInfo]:
        async with contextlib.aclosing(holdings.scan(self._info(namespace))) as pages:
            return [block async for page in pages for block in page]

    async def _verified(self, holdings: Holdings, blocks: list[BlockInfo]) -> dict[BlockKey, bytes]:
        """Read blocks in one call; return the payloads of those that verify."""
        found: dict[BlockKey, bytes] = {}
        for block, record in zip(blocks, await holdings.read(self._info(), blocks), strict=True):
            assert record is None or isinstance(record, memoryview | RecordError), f"{block}: {record!r}"
            if isinstance(record, memoryview):
                with contextlib.suppress(RecordError):
                    size = decode_header(record[:HEADER_BYTES]).header_bytes
                    codec = RecordCodec(self.namespace, header_bytes=size, alignment=holdings.header_bytes)
                    length = codec.verify(block.key, record[:size], record[size:], len(record))
                    found[block.key] = bytes(record[size : size + length])
        return found

    async def _found(self, backend: Backend, keys: list[BlockKey]) -> list[BlockKey]:
        """Return the keys that an engine reads OK from the medium."""
        engine = await self.opened_backend(await self._again(backend))
        reads = [RecordRead(key, [memoryview(bytearray(self.geometry(engine).record_bytes_max))]) for key in keys]
        outcomes = await engine.get_into(reads)
        await engine.close()
        return [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]

    def _info(self, namespace: Namespace | None = None) -> NamespaceInfo:
        return NamespaceInfo((namespace or self.namespace).hex)
