"""Namespaces of a Redis tier as the admin tools list them, from given values, without a server."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec
import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.backends.redis import holdings as module
from kvstore.backends.redis.connection import Answer
from kvstore.backends.redis.failures import RedisError
from kvstore.backends.redis.holdings import RedisHoldings, _Name, _Value
from kvstore.backends.redis.parts import PART_BYTES, PART_HEADER_BYTES, in_parts
from kvstore.backends.redis.resp import Target
from kvstore.codec.record import MAGIC
from kvstore.namespace import Namespace
from kvstore.secret import SecretStr
from kvstore.testing.records import RecordMaker
from kvstore.types import BlockInfo, NamespaceInfo, RemovalCause
from tests.redis.clients import NAMESPACE, opened, options_for
from tests.redis.servers import Server, cli


class Shown:
    """A stand-in for the servers that describes given values."""

    def __init__(self, values: Sequence[_Value]) -> None:
        self._values = values

    async def pages(self, namespace: str = "") -> AsyncGenerator[list[_Name], None]:
        for value in self._values:
            yield [value.name]

    async def describe(self, names: Sequence[_Name]) -> list[_Value]:
        return [value for value in self._values if value.name in names]

    async def part_heads(self, names: Sequence[bytes]) -> list[bytes]:
        heads = {value.name.full: value.head[:PART_HEADER_BYTES] for value in self._values}
        return [heads.get(name, b"") for name in names]

    async def read(self, wanted: Sequence[tuple[bytes, Target]]) -> list[Answer]:
        return [None for _ in wanted]

    async def exist(self, names: Sequence[bytes]) -> list[bool]:
        return [any(value.name.full == name for value in self._values) for name in names]


def value_of(namespace: Namespace, head: bytes, age_s: float = 0.0, key: bytes = b"k" * 16) -> _Value:
    """Return a value named like a block of a namespace."""
    digits = namespace.hex[:32]
    return _Value(_Name(f"kv:{digits}:{key.hex()}".encode(), digits, key, None), 1000, head, age_s)


def header_of(namespace: Namespace) -> bytes:
    """Return a record's header."""
    records = RecordMaker(namespace, RecordGeometry(256, 4096), random.Random(3))
    return bytes(records.write(records.key(), records.payload()).buffers[0][:256])


def holdings_of(*values: _Value) -> RedisHoldings:
    """Return the holdings of servers with given values."""
    holdings = RedisHoldings(RedisBackend, RedisConfig())
    holdings._values = Shown(values)  # type: ignore[assignment]
    return holdings


async def listed(*values: _Value) -> list[NamespaceInfo]:
    """Return the namespaces found by the tools."""
    return await holdings_of(*values).namespaces()


async def test_a_header_of_another_namespace_gives_no_digest() -> None:
    """A name contains half of the digest; a record of another namespace under it does not provide the other half."""
    other = header_of(Namespace({"other": 1}))
    (found,) = await listed(value_of(NAMESPACE, other))
    assert found.hex == NAMESPACE.hex[:32] + "0" * 32
    (found,) = await listed(value_of(NAMESPACE, other), value_of(NAMESPACE, header_of(NAMESPACE), key=b"2" * 16))
    assert found.hex == NAMESPACE.hex


@pytest.mark.parametrize("ages_s", [(100.0, 5000.0), (5000.0, 100.0)])
async def test_the_last_use_is_that_of_the_block_used_last(ages_s: tuple[float, float]) -> None:
    """The most recent use counts in any listing order; values that only resemble blocks do not count."""
    damaged = MAGIC + bytes(248)
    values = [value_of(NAMESPACE, damaged, age_s, bytes([i]) * 16) for i, age_s in enumerate(ages_s)]
    (found,) = await listed(*values, value_of(NAMESPACE, b"something else", 1.0, b"e" * 16))
    assert time.time() - found.used_at == pytest.approx(100.0, abs=30.0)
    assert await listed(value_of(NAMESPACE, b"something else")) == []


async def test_more_namespaces_than_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program's names under our prefix do not fill the memory: namespaces above the limit are an error."""
    monkeypatch.setattr(module, "_NAMESPACES_MAX", 2)
    namespaces = [Namespace({"n": n}) for n in range(3)]
    values = [value_of(namespace, header_of(namespace)) for namespace in namespaces]
    assert {found.hex for found in await listed(*values[:2])} == {namespace.hex for namespace in namespaces[:2]}
    with pytest.raises(RedisError, match="more than 2 namespaces"):
        await listed(*values)


async def test_a_later_part_in_place_of_the_first_is_listed_as_one_value() -> None:
    """Only a first part contains the length and the parts of its block; any other value there is read unchanged."""
    first, later = [b"".join(part)[:288] for part in in_parts([memoryview(bytes(PART_BYTES + 1))])]
    values = [value_of(NAMESPACE, head, key=key) for head, key in ((first, b"1" * 16), (later, b"2" * 16))]
    values = [value._replace(name=value.name._replace(part=0)) for value in values]
    holdings = holdings_of(*values)
    listed = [block async for page in holdings.scan(NamespaceInfo(NAMESPACE.hex)) for block in page]
    names = [value.name.full for value in values]
    assert [(block.size_bytes, block.place.names) for block in listed] == [
        (PART_BYTES + 1, [names[0], names[0][:-1] + b"1"]),
        (1000, [names[1]]),
    ]


@pytest.mark.parametrize("has_first", [False, True])
async def test_a_value_named_like_a_part_is_stale_only_beside_a_first_part(has_first: bool) -> None:
    """Without a header of a part, it may be another program's value; beside a first part, it is damaged."""
    block = value_of(NAMESPACE, b"").name
    head = b"".join(in_parts([memoryview(bytes(PART_BYTES + 1))])[0])[:PART_HEADER_BYTES]
    first, later = (
        _Value(block._replace(part=number), 1000, head, 1000.0) for number, head in enumerate([head, b"damaged"])
    )
    holdings = holdings_of(*([first, later] if has_first else [later]))
    assert [item.name for item in await holdings.stale_items()] == [later.name.full.decode()] * has_first


@pytest.mark.parametrize("whole_namespace", [False, True])
async def test_a_block_is_listed_until_all_its_parts_are_removed(own_server: Server, whole_namespace: bool) -> None:
    """After a failure, the next listing has the block again, and its removal leaves no part."""
    backend = await opened(own_server, PART_BYTES)
    records = RecordMaker(NAMESPACE, RecordGeometry(256, PART_BYTES), random.Random(3))
    await backend.put([records.write(records.key(), records.payload())])
    # A user who may read all values and remove the first parts only.
    cli(own_server, "ACL", "SETUSER", "some", "on", ">word", "+@all", "%R~*", "%W~*:0")
    config = msgspec.structs.replace(backend.config, username="some", password=SecretStr("word"))
    holdings = RedisHoldings(RedisBackend, config)
    await holdings.open()
    try:

        async def remove() -> int:
            (namespace,) = await holdings.namespaces()
            if whole_namespace:
                return await holdings.remove_namespace(namespace)
            blocks: list[BlockInfo] = [block async for page in holdings.scan(namespace) for block in page]
            return await holdings.remove(namespace, blocks, RemovalCause.REMOVED)

        with pytest.raises(RedisError, match="NOPERM"):
            await remove()
        cli(own_server, "ACL", "SETUSER", "some", "~*")
        assert await remove() == 1
        assert cli(own_server, "DBSIZE").strip() == "0"
    finally:
        await holdings.close()


@pytest.mark.parametrize("payload_bytes", [4096, PART_BYTES])
async def test_a_few_blocks_are_found_without_reading_others(own_server: Server, payload_bytes: int) -> None:
    """Names and EXISTS suffice for the fields of namespaces, the time of their store, and the presence of blocks."""
    namespace, geometry = Namespace({"model": "llama"}), RecordGeometry(256, payload_bytes)
    backend = RedisBackend(RedisConfig(**options_for(own_server)))
    await backend.open(namespace, geometry)
    records = RecordMaker(namespace, geometry, random.Random(3))
    keys = [records.key() for _ in range(3)]
    await backend.put([records.write(key, records.payload()) for key in keys])
    await backend.close()
    prefix = backend.config.prefix
    cli(own_server, "SET", f"{prefix}other:namespace", "{}")
    cli(own_server, "EXPIRE", f"{prefix}{namespace.hex[:32]}:namespace", str(89 * 86400))
    # Without the commands that describe blocks.
    rights = ("+hello", "+scan", "+get", "+pttl", "+exists", f"~{prefix}*")
    cli(own_server, "ACL", "SETUSER", "looks", "on", ">word", *rights)
    config = msgspec.structs.replace(backend.config, username="looks", password=SecretStr("word"))
    holdings = RedisHoldings(RedisBackend, config)
    await holdings.open()
    try:
        (found,) = await holdings.described()
        assert (found.hex, found.fields) == (namespace.hex, namespace.document()["fields"])
        assert time.time() - found.used_at == pytest.approx(86400.0, abs=600.0)
        assert await holdings.present(found, [keys[0], keys[2], b"none"]) == {keys[0], keys[2]}
        with pytest.raises(RedisError, match="NOPERM"):
            await holdings.namespaces()
    finally:
        await holdings.close()
