"""Holdings of an S3 tier: what lies under its prefix, page by page, beside the engines that use it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from kvstore.backends.s3.client import ObjectInfo
from kvstore.backends.s3.clients import make_client
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.keys import ObjectName, read_name
from kvstore.backends.s3.pack_format import PackFormat, PackNames
from kvstore.backends.s3.pack_reader import PackReader
from kvstore.backends.s3.presence import snapshot_folder
from kvstore.backends.s3.removals import NOTES_AGE_S, REMOVALS_MAX, outdated, remove
from kvstore.backends.s3.uses import all_uses
from kvstore.cli.holdings.base import (
    LITTER_MAX,
    HeldBlock,
    HeldNamespace,
    HeldRecord,
    Litter,
    check_record,
    record_room,
)
from kvstore.cli.holdings.remote import RemoteHoldings
from kvstore.cli.holdings.s3_places import Pack, Packed, Single, last_used, live_blocks, names_of, read_pack
from kvstore.codec.record import HEADER_BYTES
from kvstore.errors import BackendError, RecordError
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, RemovalCause

__all__ = ["S3Holdings"]

_RECORD_BYTES_MAX: Final = 1 << 30
"""Longest record that is taken into memory; blocks have megabytes."""

_HEADS_AT_ONCE: Final = 32
"""Heads of packs, or notes, that are read at the same time."""

_ANSWER_S: Final = 10.0
"""Least time for an answer: nobody waits for a command as an engine does, whose time for lookups is short."""

_GONE_MAX: Final = 1_000_000
"""Removals from packs of a namespace that are remembered, some 150 bytes each."""

_PAST_OUR_FOLDERS: Final = "_q"
"""Comes after the folders of packs, probes and the keeper, which no walk over single blocks need list."""

_NO_RECORD: Final = memoryview(bytes(HEADER_BYTES))
"""Stands for the records of a pack whose head is damaged: it does not verify."""


class S3Holdings(RemoteHoldings):
    """Holdings of an S3 tier.

    Nothing is locked: a block's object is whole or not there, and an engine that looks for one that was removed has a
    miss. Names that are not ours are passed over, whatever lies there. No engine can be seen at work: what is used is
    known as far as engines that keep a capacity, a time to live or snapshots tell it.

    Args:
        config: The tier's configuration.

    Raises:
        ConfigError: The configuration, or the client's package, can't be used.
        S3Error: The service refuses, or does not answer.
    """

    backend = "s3"
    header_bytes = HEADER_BYTES

    def __init__(self, config: S3Config) -> None:
        super().__init__()
        self._config = msgspec.structs.replace(config, lookup_timeout=max(config.lookup_timeout, _ANSWER_S))
        self._prefix = config.prefix
        self.ttl_s = float(config.ttl)
        self._used: dict[int, int] | None = None
        # Of the last walk: what hides blocks, as it can't be read.
        self._hidden: list[Pack] = []
        self._client = make_client(config)
        try:
            self._run(self._connect())
        except BaseException:
            self.close()
            raise

    def namespaces(self) -> list[HeldNamespace]:
        """See :meth:`Holdings.namespaces`. Takes one LIST for a thousand objects."""
        found = self._run(self._newest())
        return sorted((HeldNamespace(name, used_at=at) for name, at in found.items()), key=lambda each: -each.used_at)

    def blocks(self, namespace: HeldNamespace) -> Iterator[HeldBlock]:
        """See :meth:`Holdings.blocks`. A block that lies in two packs is yielded twice.

        Raises:
            S3Error: The service failed; if only for some packs, after all others.
        """
        yield from super().blocks(namespace)
        failed = next((pack for pack in self._hidden if pack.error), None)
        if failed is not None:
            raise S3Error(Cause.PROTOCOL, f"{failed.info.key!r} can't be read: {failed.error}")

    def records(self, namespace: HeldNamespace) -> Iterator[HeldRecord]:
        """See :meth:`Holdings.records`. At last come the packs that can't be read, under the digits of their names."""
        yield from self._records_of(super().blocks(namespace), namespace)
        for pack in self._hidden:
            name = read_name(pack.info.key.removeprefix(self._prefix))
            key = b"" if name is None else name.key
            block = HeldBlock(key, pack.info.size_bytes, pack.info.modified_at, Packed(pack.info.key, 0, 0))
            if pack.error:
                yield HeldRecord(block, None, f"{pack.info.key!r}: {pack.error}")
            else:
                yield HeldRecord(block, _NO_RECORD)

    def set_aside(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]) -> int:
        """See :meth:`Holdings.set_aside`. They are read again, and deleted if they are damaged still."""
        return self._run(self._drop_damaged(namespace, blocks))

    def remove(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock] | None) -> int:
        """See :meth:`Holdings.remove`. Engines that keep a capacity, a time to live or snapshots are told."""
        if blocks is not None:
            return self._run(self._drop(namespace, blocks, RemovalCause.EXPIRED))
        return self._run(self._drop_all(namespace))

    def litter(self) -> list[Litter]:
        """See :meth:`Holdings.litter`."""
        return self._run(self._find_litter())

    def sweep(self, litter: Sequence[Litter]) -> int:
        """See :meth:`Holdings.sweep`."""
        self._run(self._delete([self._prefix + piece.name for piece in litter]))
        return len(litter)

    async def _connect(self) -> None:
        await self._client.open()
        await self._client.probe(
            f"{self._prefix}_probe/holdings", timeout_s=self._config.timeout + self._config.connect_timeout
        )

    async def _disconnect(self) -> None:
        await self._client.close()

    async def _newest(self) -> dict[str, float]:
        """Return the namespaces that have blocks, and when one of those was last written or used; 0.0 if not known."""
        used = await self._uses()
        found: dict[str, float] = {}
        unknown: set[str] = set()
        async with aclosing(self._listed("")) as pages:
            async for objects in pages:
                for info, name in objects:
                    if name.kind != "note":
                        used_at = last_used(info, used)
                        found[name.namespace] = max(found.get(name.namespace, 0.0), used_at)
                        if not used_at:
                            unknown.add(name.namespace)
        return found | dict.fromkeys(unknown, 0.0)

    async def _uses(self) -> dict[int, int]:
        if self._used is None:
            self._used = await all_uses(self._client, self._config)
        return self._used

    async def _listed(self, folder: str, skip: str = "") -> AsyncGenerator[list[tuple[ObjectInfo, ObjectName]], None]:
        """Yield what is ours in a folder under the prefix, page by page; not what lies between ``_`` and ``skip``."""
        after, more = "", True
        while more:
            page = await self._client.list_page(
                self._prefix + folder, start_after=after, timeout_s=self._config.lookup_timeout
            )
            named = [(info, read_name(info.key.removeprefix(self._prefix))) for info in page.objects]
            found = [(info, name) for info, name in named if name is not None]
            if found:
                yield found
            more = page.more and bool(page.objects)
            after = page.objects[-1].key if page.objects else after
            if skip and after.startswith(f"{self._prefix}_"):
                after = max(after, self._prefix + skip)

    async def _pages(self, namespace: HeldNamespace) -> AsyncGenerator[Sequence[HeldBlock], None]:
        """See :meth:`RemoteHoldings._pages`: blocks with an object of their own, then those in packs."""
        self._hidden = []
        used = await self._uses()
        async with aclosing(self._listed("", skip=_PAST_OUR_FOLDERS)) as pages:
            async for objects in pages:
                yield [
                    HeldBlock(name.key, info.size_bytes, last_used(info, used), Single(info.key, info.etag))
                    for info, name in objects
                    if name.kind == "block" and name.namespace == namespace.hex
                ]
        gone = await self._gone(namespace.hex)
        async with aclosing(self._read_folder(namespace.hex, "pack")) as packs:
            async for group in packs:
                self._hidden += [pack for pack in group if pack.error or pack.is_damaged]
                yield [block for pack in group for block in live_blocks(pack, gone, last_used(pack.info, used))]

    async def _read_folder(self, namespace: str, kind: str) -> AsyncGenerator[list[Pack], None]:
        """Yield the packs, or the notes, of a namespace, as they could be read, some at once."""
        reader = PackReader(self._client, self._config, Namespace.of_digest(bytes.fromhex(namespace)))
        async with aclosing(self._listed(f"_packs/{namespace}/")) as pages:
            async for objects in pages:
                infos = [info for info, name in objects if name.kind == kind]
                for start in range(0, len(infos), _HEADS_AT_ONCE):
                    some = infos[start : start + _HEADS_AT_ONCE]
                    yield list(await asyncio.gather(*(read_pack(reader, info, kind) for info in some)))

    async def _gone(self, namespace: str) -> set[tuple[str, BlockKey]]:
        """Return what notes say is gone: names of packs, and keys."""
        folder = self._pack_folder(namespace)
        found: set[tuple[str, BlockKey]] = set()
        async with aclosing(self._read_folder(namespace, "note")) as notes:
            async for group in notes:
                for note in group:
                    if note.error:
                        raise S3Error(Cause.PROTOCOL, f"{note.info.key!r} can't be read: {note.error}")
                    found.update((folder + pair[0], pair[1]) for pair in note.found or () if isinstance(pair, tuple))
                    if len(found) > _GONE_MAX:
                        raise S3Error(
                            Cause.PROTOCOL,
                            f"More than {_GONE_MAX} blocks were removed from packs of namespace {namespace[:16]}. "
                            "Delete what lies under the prefix, or this namespace of it.",
                        )
        return found

    def _pack_folder(self, namespace: str) -> str:
        return PackNames(self._prefix, Namespace.of_digest(bytes.fromhex(namespace))).folder

    async def _read_batch(
        self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]
    ) -> Sequence[memoryview | BackendError | None]:
        """See :meth:`RemoteHoldings._read_batch`."""
        return await asyncio.gather(*(self._read_one(block) for block in blocks))

    async def _read_one(self, block: HeldBlock) -> memoryview | BackendError | None:
        place: Single | Packed = block.place
        if block.size_bytes > _RECORD_BYTES_MAX:
            return S3Error(Cause.LENGTH, f"{place.name!r} has {block.size_bytes} bytes, more than any block.")
        if not block.size_bytes:
            return memoryview(b"")
        record = record_room(block.size_bytes)
        offset = place.offset if isinstance(place, Packed) else None
        timeout_s = self._config.load_timeout + block.size_bytes / self._config.bytes_per_second_min
        try:
            got = await self._client.get_into(place.name, [record], offset=offset, timeout_s=timeout_s)
        except S3Error as error:
            return error
        return None if got is None else record[: got.size_bytes]

    async def _drop_damaged(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]) -> int:
        """Delete blocks that are as they were found, and damaged when they are read once more, one after the other."""
        still = [await self._is_damaged(namespace, block) for block in blocks]
        return await self._drop(namespace, list(itertools.compress(blocks, still)), RemovalCause.CORRUPT)

    async def _is_damaged(self, namespace: HeldNamespace, block: HeldBlock) -> bool:
        place: Single | Packed = block.place
        if isinstance(place, Single) and not await self._is_same(place):
            return False
        if isinstance(place, Packed) and not place.live:
            # Stands for a pack whose head is damaged.
            info = ObjectInfo(place.name, block.size_bytes, "", block.used_at)
            digest = Namespace.of_digest(bytes.fromhex(namespace.hex))
            return (await read_pack(PackReader(self._client, self._config, digest), info, "pack")).is_damaged
        record = await self._read_one(block)
        if not isinstance(record, memoryview):
            return False
        try:
            check_record(record, namespace.hex, block.key, alignment=self.header_bytes)
        except RecordError:
            return True
        return False

    async def _drop(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock], cause: RemovalCause) -> int:
        """Delete blocks, and say of packs that have others what is gone."""
        names = [block.place.name for block in blocks if isinstance(block.place, Single)]
        packed: dict[str, list[HeldBlock]] = {}
        for block in blocks:
            if isinstance(block.place, Packed):
                packed.setdefault(block.place.name, []).append(block)
        noted: list[tuple[str, BlockKey]] = []
        for pack, part in packed.items():
            if len(part) >= part[0].place.live:
                names.append(pack)
            else:
                noted += [(pack.rpartition("/")[2], block.key) for block in part]
        if noted:
            digest = Namespace.of_digest(bytes.fromhex(namespace.hex))
            made, own = PackFormat(digest), PackNames(self._prefix, digest)
            for start in range(0, len(noted), REMOVALS_MAX):
                body = made.gone_note(noted[start : start + REMOVALS_MAX])
                await self._client.put(own.new(gone=True), [body], timeout_s=self._config.store_timeout)
        await self._delete(names, cause)
        return len(blocks)

    async def _is_same(self, place: Single) -> bool:
        found = await self._client.head(place.name, timeout_s=self._config.lookup_timeout)
        return found is not None and found.etag.strip('"') == place.etag.strip('"')

    async def _drop_all(self, namespace: HeldNamespace) -> int:
        """Delete all objects of a namespace: blocks, packs, then notes and the snapshot."""
        count, names = 0, list[str]()
        async with aclosing(self._pages(namespace)) as pages:
            async for blocks in pages:
                count += len(blocks)
                names = await self._delete_full([*names, *names_of(blocks)], RemovalCause.EXPIRED)
        await self._delete(names, RemovalCause.EXPIRED)
        names = [snapshot_folder(self._prefix) + namespace.hex]
        async with aclosing(self._listed(f"_packs/{namespace.hex}/")) as rest:
            async for objects in rest:
                names = await self._delete_full([*names, *(info.key for info, _ in objects)])
        await self._delete(names)
        return count

    async def _delete_full(self, names: list[str], cause: RemovalCause | None = None) -> list[str]:
        """Delete as many objects as make whole requests; return the others."""
        whole = len(names) - len(names) % REMOVALS_MAX
        await self._delete(names[:whole], cause)
        return names[whole:]

    async def _delete(self, names: Sequence[str], cause: RemovalCause | None = None) -> None:
        """Delete objects; with a cause, tell engines."""
        if cause is None:
            await self._client.delete_all(names, timeout_s=self._config.store_timeout)
        else:
            await remove(self._client, self._config, names, cause)

    async def _find_litter(self) -> list[Litter]:
        found: list[Litter] = []
        written_before = time.time() - NOTES_AGE_S
        async with aclosing(outdated(self._client, self._config)) as old:
            async for info, what in old:
                found.append(self._litter(info, what))
                if len(found) > LITTER_MAX:
                    return found
        namespaces: set[str] = set()
        async with aclosing(self._listed("_packs/")) as named:
            async for page in named:
                namespaces.update(name.namespace for _, name in page)
        for namespace in sorted(namespaces):
            found += await self._pack_litter(namespace, written_before, LITTER_MAX - len(found))
            if len(found) > LITTER_MAX:
                break
        return found

    async def _pack_litter(self, namespace: str, written_before: float, room: int) -> list[Litter]:
        """Return the packs of which nothing is left, or nobody can read; and the notes that only speak of such ones.

        With more of them than ``room`` it ends early.
        """
        found: list[Litter] = []
        gone, there = await self._gone(namespace), set[str]()
        async with aclosing(self._read_folder(namespace, "pack")) as packs:
            async for group in packs:
                for pack in group:
                    if pack.is_damaged:
                        found.append(self._litter(pack.info, "pack with a damaged head"))
                    elif pack.found is not None and not live_blocks(pack, gone, 0.0):
                        found.append(self._litter(pack.info, "pack of which all blocks were removed"))
                    # Its notes stay one time longer, as it is still there.
                    there.add(pack.info.key)
                if len(found) > room:
                    return found
        folder = self._pack_folder(namespace)
        async with aclosing(self._read_folder(namespace, "note")) as notes:
            async for group in notes:
                for note in group:
                    speaks_of = {folder + pair[0] for pair in note.found or () if isinstance(pair, tuple)}
                    is_useless = note.is_damaged or (note.found is not None and not speaks_of & there)
                    if is_useless and 0 < note.info.modified_at < written_before:
                        found.append(self._litter(note.info, "note of removals from packs that are gone"))
                if len(found) > room:
                    return found
        return found

    def _litter(self, info: ObjectInfo, why: str) -> Litter:
        return Litter(info.key.removeprefix(self._prefix), why, info.size_bytes)
