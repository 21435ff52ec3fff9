"""Holdings of an S3 tier: blocks, packs, notes and housekeeping objects under its prefix, listed page by page.

No locks are needed: a block's object is complete or absent, and an engine that reads a removed one gets a miss. Objects
with names of another form are skipped. A bucket does not show which engines are running; only engines with a capacity
or a time to live publish uses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from kvstore.backends.base import Backend
from kvstore.backends.holdings import (
    DESCRIPTION_BYTES_MAX,
    STALE_MAX,
    Holdings,
    ReadResult,
    StaleItem,
    fields_in,
    is_digest,
)
from kvstore.backends.s3.client import DELETES_MAX, ObjectInfo, make_client
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.names import DESCRIPTIONS, ObjectName, read_name
from kvstore.backends.s3.notes import NOTES_AGE_S, all_uses, name_digest, outdated, remove
from kvstore.backends.s3.packs import Pack, PackReader
from kvstore.codec.record import RecordFault
from kvstore.config import TierConfig
from kvstore.errors import ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, NamespaceInfo, RemovalCause

_ANSWER_S: Final = 10.0
"""Minimum timeout of a request; engines' lookups use shorter ones."""

_GONE_MAX: Final = 1_000_000
"""Removals from the packs of a namespace that are kept in memory, 150 bytes each."""

_HEADS_AT_ONCE: Final = 256
"""HEADs in one round; the client bounds the concurrent ones."""

_AFTER_FOLDERS: Final = "_q"
"""Sorts after the folders of packs, probes and housekeeping: listings of single blocks skip those folders."""


class _Place(NamedTuple):
    """Location of a block."""

    name: str  # Name of the object.
    offset: int | None = None  # Offset of the record in a pack; None for a block with its own object.
    live: int = 1  # Blocks of the pack that were not removed; 0 in a placeholder for an unreadable pack.
    etag: str = ""  # Version of a block's own object.


class S3Holdings(Holdings):
    """Holdings of an S3 tier."""

    record_bytes_max: ClassVar[int] = 1 << 30

    def __init__(self, backend: type[Backend], config: TierConfig) -> None:
        if not isinstance(config, S3Config):
            raise ConfigError(f"An S3 tier is configured by an S3Config. Got {type(config).__name__}.")
        super().__init__(backend, config)
        self.ttl_s = float(config.ttl)
        self._prefix = config.prefix
        self._probe_s = config.timeout + config.connect_timeout
        self._used: dict[int, int] | None = None
        self._client = make_client(
            msgspec.structs.replace(config, lookup_timeout=max(config.lookup_timeout, _ANSWER_S))
        )

    async def open(self) -> None:
        await self._client.open()
        await self._client.probe(f"{self._prefix}_probe/holdings", timeout_s=self._probe_s)

    async def close(self) -> None:
        await self._client.close()

    async def namespaces(self) -> list[NamespaceInfo]:
        """Takes one LIST per thousand objects, and a GET per namespace."""
        used = await self._uses()
        newest: dict[str, float] = {}
        unknown: set[str] = set()
        async with aclosing(self._listed("")) as pages:
            async for objects in pages:
                for info, name in objects:
                    if name.kind != "note":
                        used_at = _last_used(info, used)
                        newest[name.namespace] = max(newest.get(name.namespace, 0.0), used_at)
                        if not used_at:
                            unknown.add(name.namespace)
        return [
            NamespaceInfo(name, await self._fields(name), used_at=0.0 if name in unknown else at)
            for name, at in newest.items()
        ]

    async def described(self) -> list[NamespaceInfo]:
        """Takes one LIST per thousand namespaces, and a GET per namespace."""
        found, folder = [], self._prefix + DESCRIPTIONS
        async with aclosing(self._client.listed(folder)) as stored:
            async for info in stored:
                digits = info.key.removeprefix(folder)
                if is_digest(digits) and (fields := await self._fields(digits)) is not None:
                    found.append(NamespaceInfo(digits, fields, used_at=info.modified_at))
        return found

    async def present(self, namespace: NamespaceInfo, keys: Collection[BlockKey]) -> set[BlockKey]:
        """Takes one HEAD per key; if one is missing, a listing of the namespace's packs and a GET for each pack."""
        names, wanted = self._reader(namespace.hex).names, list(keys)
        found = set[BlockKey]()
        for start in range(0, len(wanted), _HEADS_AT_ONCE):
            some = wanted[start : start + _HEADS_AT_ONCE]
            heads = await asyncio.gather(*[self._client.head(names.block(key)) for key in some], return_exceptions=True)
            for key, head in zip(some, heads, strict=True):
                if isinstance(head, BaseException):
                    raise head
                if head is not None:
                    found.add(key)
        if len(found) < len(wanted):
            gone = await self._gone(namespace.hex)
            async with aclosing(self._read_folder(namespace.hex, "pack")) as packs:
                async for pack in packs:
                    if isinstance(pack.fault, S3Error):
                        raise pack.fault
                    found.update(block.key for block in _live_blocks(pack, gone, 0.0))
        return found & set(wanted)

    async def scan(self, namespace: NamespaceInfo) -> AsyncGenerator[Sequence[BlockInfo], None]:
        """Single blocks, then packs. A block in two packs is yielded twice.

        Unreadable packs come last; their keys are the digits of their names.
        """
        used = await self._uses()
        async with aclosing(self._listed("", skip=_AFTER_FOLDERS)) as pages:
            async for objects in pages:
                yield [
                    BlockInfo(name.key, info.size_bytes, _last_used(info, used), _Place(info.key, etag=info.etag))
                    for info, name in objects
                    if name.kind == "block" and name.namespace == namespace.hex
                ]
        gone = await self._gone(namespace.hex)
        unreadable: list[BlockInfo] = []
        async with aclosing(self._read_folder(namespace.hex, "pack")) as packs:
            async for pack in packs:
                if (fault := _fault_of(pack)) is not None:
                    name = read_name(pack.info.key.removeprefix(self._prefix))
                    key = b"" if name is None else name.key
                    place = _Place(pack.info.key, 0, 0)
                    unreadable.append(BlockInfo(key, pack.info.size_bytes, pack.info.modified_at, place, fault))
                yield _live_blocks(pack, gone, _last_used(pack.info, used))
        yield unreadable

    async def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Sequence[ReadResult]:
        rooms = self._rooms([block if block.place.live else BlockInfo(block.key, 0) for block in blocks])
        reads = [self._read_one(namespace, block, room) for block, room in zip(blocks, rooms, strict=True)]
        return await asyncio.gather(*reads)

    async def remove(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo], cause: RemovalCause) -> int:
        """Removals from packs with remaining blocks go into notes, which engines read."""
        if cause is RemovalCause.CORRUPT:
            blocks = [block for block in blocks if await self._is_same(block.place)]
        names = [block.place.name for block in blocks if block.place.offset is None]
        packed: dict[str, list[BlockInfo]] = {}
        for block in blocks:
            if block.place.offset is not None:
                packed.setdefault(block.place.name, []).append(block)
        noted: list[tuple[str, BlockKey]] = []
        for pack, part in packed.items():
            if len(part) >= part[0].place.live:
                names.append(pack)
            else:
                noted += [(pack.rpartition("/")[2], block.key) for block in part]
        packs = self._reader(namespace.hex)
        for start in range(0, len(noted), DELETES_MAX):
            await self._client.put(packs.names.new_note(), [packs.format.gone_note(noted[start : start + DELETES_MAX])])
        await remove(self._client, self._prefix, names, cause)
        return len(blocks)

    async def remove_namespace(self, namespace: NamespaceInfo) -> int:
        """Blocks and packs, then notes and the fields."""
        count, names = 0, list[str]()
        async with aclosing(self.scan(namespace)) as pages:
            async for blocks in pages:
                count += sum(block.fault is None for block in blocks)
                names += dict.fromkeys(block.place.name for block in blocks if block.fault is None)
                # Only full requests, so that each note lists as many names as possible.
                whole = len(names) - len(names) % DELETES_MAX
                await remove(self._client, self._prefix, names[:whole], RemovalCause.EXPIRED)
                names = names[whole:]
        await remove(self._client, self._prefix, names, RemovalCause.EXPIRED)
        names = [self._reader(namespace.hex).names.fields]
        async with aclosing(self._listed(f"_packs/{namespace.hex}/")) as rest:
            async for objects in rest:
                names += [info.key for info, _ in objects]
                if len(names) >= DELETES_MAX:
                    await self._client.delete_all(names)
                    names = []
        await self._client.delete_all(names)
        return count

    async def stale_items(self) -> list[StaleItem]:
        found: list[StaleItem] = []
        written_before = time.time() - NOTES_AGE_S
        async with aclosing(outdated(self._client, self._prefix)) as old:
            async for info, what in old:
                found.append(self._stale(info, what))
                if len(found) > STALE_MAX:
                    return found
        namespaces: set[str] = set()
        async with aclosing(self._listed("_packs/")) as named:
            async for page in named:
                namespaces.update(name.namespace for _, name in page)
        for namespace in sorted(namespaces):
            found += await self._stale_packs(namespace, written_before, STALE_MAX - len(found))
            if len(found) > STALE_MAX:
                break
        return found

    async def sweep(self, stale: Sequence[StaleItem]) -> int:
        await self._client.delete_all([self._prefix + piece.name for piece in stale])
        return len(stale)

    async def _read_one(self, namespace: NamespaceInfo, block: BlockInfo, room: memoryview) -> ReadResult:
        place: _Place = block.place
        if not place.live:
            return _fault_of(await self._reader(namespace.hex).read(ObjectInfo(place.name, block.size_bytes, "", 0.0)))
        if not block.size_bytes:
            return room
        try:
            got = await self._client.get_into(place.name, [room], offset=place.offset)
        except S3Error as error:
            return error
        return None if got is None else room[: got.size_bytes]

    async def _is_same(self, place: _Place) -> bool:
        """Return whether a block's object still has the scanned version; packs are never rewritten."""
        if place.offset is not None:
            return True
        found = await self._client.head(place.name)
        return found is not None and found.etag.strip('"') == place.etag.strip('"')

    async def _fields(self, namespace: str) -> dict[str, Any] | None:
        """Return the stored fields of a namespace; None if they are not there or not readable."""
        with suppress(S3Error):
            stored = await self._client.get_start(self._reader(namespace).names.fields, DESCRIPTION_BYTES_MAX)
            return fields_in(stored, namespace)
        return None

    async def _uses(self) -> dict[int, int]:
        if self._used is None:
            self._used = await all_uses(self._client, self._prefix)
        return self._used

    async def _listed(self, folder: str, skip: str = "") -> AsyncGenerator[list[tuple[ObjectInfo, ObjectName]], None]:
        """Yield our objects in a folder under the prefix, page by page, except those from ``_`` to ``skip``."""
        after, more = "", True
        while more:
            page = await self._client.list_page(self._prefix + folder, start_after=after)
            named = [(info, read_name(info.key.removeprefix(self._prefix))) for info in page.objects]
            found = [(info, name) for info, name in named if name is not None]
            if found:
                yield found
            more = page.more and bool(page.objects)
            after = page.objects[-1].key if page.objects else after
            if skip and after.startswith(f"{self._prefix}_"):
                after = max(after, self._prefix + skip)

    async def _read_folder(self, namespace: str, kind: str) -> AsyncGenerator[Pack, None]:
        """Yield the packs, or the notes, of a namespace."""
        async with aclosing(self._listed(f"_packs/{namespace}/")) as pages:
            async for objects in pages:
                infos = [info for info, name in objects if name.kind == kind]
                async for pack in self._reader(namespace).read_all(infos):
                    yield pack

    async def _gone(self, namespace: str) -> set[tuple[str, BlockKey]]:
        """Return the removed blocks that notes list, by name of the pack and key."""
        found: set[tuple[str, BlockKey]] = set()
        async with aclosing(self._read_folder(namespace, "note")) as notes:
            async for note in notes:
                if isinstance(note.fault, S3Error):
                    raise S3Error(Cause.PROTOCOL, f"{note.info.key!r} can't be read: {note.fault}")
                found.update(note.gone or ())
                if len(found) > _GONE_MAX:
                    raise S3Error(
                        Cause.PROTOCOL,
                        f"More than {_GONE_MAX} blocks were removed from packs of namespace {namespace[:16]}. "
                        "Delete this namespace, or everything under the prefix.",
                    )
        return found

    def _reader(self, namespace: str) -> PackReader:
        return PackReader(self._client, self._prefix, _namespace(namespace))

    async def _stale_packs(self, namespace: str, written_before: float, room: int) -> list[StaleItem]:
        """Return empty or damaged packs, and notes about deleted packs. Stops early beyond ``room`` of them."""
        found: list[StaleItem] = []
        gone, there = await self._gone(namespace), set[str]()
        async with aclosing(self._read_folder(namespace, "pack")) as packs:
            async for pack in packs:
                if pack.is_damaged:
                    found.append(self._stale(pack.info, "pack with a damaged head"))
                elif pack.entries is not None and not _live_blocks(pack, gone, 0.0):
                    found.append(self._stale(pack.info, "pack without remaining blocks"))
                # The notes of a stale pack stay until the next run, because the pack still exists.
                there.add(pack.info.key)
                if len(found) > room:
                    return found
        async with aclosing(self._read_folder(namespace, "note")) as notes:
            async for note in notes:
                is_useless = note.is_damaged or (note.gone is not None and not there & {pack for pack, _ in note.gone})
                if is_useless and 0 < note.info.modified_at < written_before:
                    found.append(self._stale(note.info, "note of removals from deleted packs"))
                if len(found) > room:
                    return found
        return found

    def _stale(self, info: ObjectInfo, why: str) -> StaleItem:
        return StaleItem(info.key.removeprefix(self._prefix), why, info.size_bytes)


def _namespace(digits: str) -> Namespace:
    return Namespace.of_digest(bytes.fromhex(digits))


def _fault_of(pack: Pack) -> RecordError | S3Error | None:
    """Return the fault that hides a pack's blocks; None without one, or for a pack of another version or namespace."""
    if pack.is_damaged:
        return RecordError(f"The head of pack {pack.info.key!r} is damaged.", RecordFault.HEADER)
    if isinstance(pack.fault, S3Error):
        return S3Error(Cause.PROTOCOL, f"{pack.info.key!r} can't be read: {pack.fault}")
    return None


def _live_blocks(pack: Pack, gone: set[tuple[str, BlockKey]], used_at: float) -> list[BlockInfo]:
    name = pack.info.key
    live = [each for each in pack.entries or () if (name, each.key) not in gone]
    return [BlockInfo(each.key, each.size_bytes, used_at, _Place(name, each.offset, len(live))) for each in live]


def _last_used(info: ObjectInfo, used: dict[int, int]) -> float:
    """Return the time of an object's last write or use, seconds since the epoch; 0.0 if unknown."""
    return max(info.modified_at, float(used.get(name_digest(info.key), 0)))
