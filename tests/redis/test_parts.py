"""Long blocks in parts: complete or a miss, whatever happens to a part; never parts of two writes."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis.parts import PART_BYTES, PartsRead, in_parts, part_count
from kvstore.backends.redis.resp import Filled, Reply
from kvstore.testing.records import RecordMaker
from kvstore.types import Outcome
from tests.redis.clients import NAMESPACE, opened
from tests.redis.fake_server import fake_server
from tests.redis.servers import Server, cli


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 250, 300])
def test_round_trip_of_all_lengths(size: int) -> None:
    """A record of any length is restored from its parts, into a longer buffer."""
    record = random.Random(size).randbytes(size)
    values = [b"".join(value) for value in in_parts([memoryview(record)[:40], memoryview(record)[40:]], 100)]
    assert len(values) == part_count(size, 100)
    room = bytearray(300)
    read = PartsRead([memoryview(room)[:7], memoryview(room)[7:]], 100)
    found = read.decide(_fill(read, values))
    assert (found.outcome, found.filled_bytes) == (Outcome.OK, size)
    assert room[:size] == record


def test_damage_is_a_miss() -> None:
    """A part that is missing, short, of another write or in the wrong place makes a miss and is removed."""
    record = random.Random(1).randbytes(250)
    values, others = ([b"".join(v) for v in in_parts([memoryview(record)], 100)] for _ in range(2))
    cases = [
        [values[0], None, values[2]],
        [values[0], values[1], None],
        [values[0], others[1], values[2]],
        [values[0], values[2], values[1]],
        [values[0], values[1][:-1], values[2]],
        [values[0], values[1][:5], values[2]],
        [values[0], b"\xff" + values[1][1:], values[2]],
    ]
    for case in cases:
        read = PartsRead([memoryview(bytearray(300))], 100)
        found = read.decide(_fill(read, case))
        assert found.outcome is Outcome.MISS and found.remove, case
    read = PartsRead([memoryview(bytearray(300))], 100)
    assert read.decide([None, Filled(132), None]).outcome is Outcome.MISS
    for first in (b"x" * 10, b"x" * 132, values[1], b"\xff" + values[0][1:]):
        read = PartsRead([memoryview(bytearray(300))], 100)
        assert read.decide(_fill(read, [first, values[1], values[2]])).outcome is Outcome.CORRUPT


def test_a_record_longer_than_its_room_is_corrupt() -> None:
    """A first part that claims more parts than were requested gives an outcome, not an exception."""
    values = [b"".join(value) for value in in_parts([memoryview(bytes(250))], 100)]
    read = PartsRead([memoryview(bytearray(200))], 100)
    assert read.decide(_fill(read, values)[:2]).outcome is Outcome.CORRUPT


def _fill(read: PartsRead, values: list[bytes | None]) -> list[Reply]:
    replies: list[Reply] = []
    for target, value in zip(read.targets, [*values, None, None, None], strict=False):
        replies.append(None if value is None else Filled(len(value)))
        for buffer in target.buffers:
            part = (value or b"")[: buffer.nbytes]
            buffer[: len(part)] = part
            value = (value or b"")[len(part) :]
    return replies


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_lost_part_is_a_miss_and_the_rest_goes(redis_server: Server, lost: int) -> None:
    """On a real server, an evicted part makes the block a miss, its other parts are removed, and a put restores it."""
    size = 2 * PART_BYTES + 12345
    backend = await opened(redis_server, size)
    maker = RecordMaker(NAMESPACE, RecordGeometry(256, size), random.Random(lost))
    key, payload = maker.key(), maker.payload()
    assert list(await backend.put([maker.write(key, payload)])) == [Outcome.OK]
    names = [f"{backend.config.prefix}{NAMESPACE.hex[:32]}:{key.hex()}:{number}" for number in range(3)]
    assert cli(redis_server, "EXISTS", *names).strip() == "3"
    cli(redis_server, "UNLINK", names[lost])
    target = maker.target(key)
    assert list(await backend.get_into([target.read])) == [Outcome.MISS]
    assert target.guards_intact
    assert list(await backend.exists([key])) == [False]
    if lost:
        assert cli(redis_server, "EXISTS", *names).strip() == "0"
    assert list(await backend.put([maker.write(key, payload)])) == [Outcome.OK]
    assert list(await backend.get_into([target.read])) == [Outcome.OK]
    assert maker.content(target) == payload
    await backend.delete([key])
    assert cli(redis_server, "EXISTS", *names).strip() == "0"


async def test_a_store_refused_in_the_middle_removes_its_parts() -> None:
    """A server without memory for one part gets those before it back; no lookup would ever find them."""
    size = 3 * PART_BYTES
    stored: set[bytes] = set()

    async def script(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        verb, name = command[:2]
        if verb == b"SET" and name.endswith(b":2"):
            writer.write(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
        elif verb == b"SET":
            stored.add(name)
            writer.write(b"+OK\r\n")
        else:
            writer.write(b":%d\r\n" % (name in stored))
            if verb == b"UNLINK":
                stored.discard(name)

    async with fake_server(script) as server:
        backend = await opened(server, size)
        maker = RecordMaker(NAMESPACE, RecordGeometry(256, size), random.Random(1))
        assert await backend.put([maker.write(maker.key(), maker.payload())]) == [Outcome.NO_SPACE]
        assert [command[0] for command in server.commands].count(b"SET") > 1
        assert stored == set()
