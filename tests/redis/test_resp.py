"""The RESP reader: for any bytes, in any pieces, the same replies or one clear error."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.backends.redis.resp import (
    BULK_BYTES_MAX,
    DEPTH_MAX,
    ELEMENTS_MAX,
    LINE_BYTES_MAX,
    SCRATCH_BYTES,
    ErrorReply,
    Filled,
    ProtocolError,
    Reply,
    ReplyReader,
    ReplyTooLongError,
    Target,
    encode_command,
)

scalars = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=300),
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=40),
    st.builds(ErrorReply, st.sampled_from(["ERR", "MOVED", "OOM"]), st.text("abc ", min_size=1, max_size=40)),
)
# A third of them are as long as their targets, as blocks are.
values = st.one_of(st.binary(max_size=3000), st.integers(0, 255).map(lambda byte: bytes([byte]) * 3000))
replies = st.recursive(scalars, lambda inner: st.lists(inner, max_size=5), max_leaves=20)


def encoded(reply: Reply, rng: random.Random) -> bytes:
    """Return a reply in any of its equivalent encodings."""
    if reply is None:
        return rng.choice([b"$-1\r\n", b"*-1\r\n"])
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, str):
        return b"+%b\r\n" % reply.encode()
    if isinstance(reply, ErrorReply):
        return b"-%b\r\n" % f"{reply.code} {reply.message}".encode()
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    assert isinstance(reply, list)
    return b"*%d\r\n" % len(reply) + b"".join(encoded(item, rng) for item in reply)


def feed(reader: ReplyReader, data: bytes, cuts: list[int]) -> list[Reply]:
    """Feed bytes to a reader in pieces, as a socket would; return the replies."""
    found: list[Reply] = []
    position = 0
    for end in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        while position < end:
            start = position
            for buffer in reader.buffers():
                assert buffer.nbytes
                part = data[position : min(end, position + buffer.nbytes)]
                buffer[: len(part)] = part
                position += len(part)
            found += reader.advance(position - start)
    return found


@settings(max_examples=400)
@given(st.lists(replies, max_size=6), st.lists(st.integers(0, 10**6), max_size=12), st.randoms(use_true_random=False))
def test_any_split_gives_the_same_replies(wanted: list[Reply], cuts: list[int], rng: random.Random) -> None:
    """Replies of all types are decoded correctly, wherever the stream is cut."""
    reader = ReplyReader()
    for _ in wanted:
        reader.expect()
    assert feed(reader, b"".join(encoded(reply, rng) for reply in wanted), cuts) == wanted


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.none(), values, st.integers(0, 1)), min_size=1, max_size=12),
    st.lists(st.integers(0, 10**6), max_size=20),
    st.integers(1, 4),
)
@example([b"a" * 3000, None, b"b" * 3000, b"c" * 2999, b"d" * 3000, b"e" * 10], [], 2)
@example([None, b"b" * 3000, b"c" * 3000], [4, 9, 2000], 1)
def test_values_go_into_their_targets(wanted: list[bytes | int | None], cuts: list[int], pieces: int) -> None:
    """Each value goes into its own target, whatever is pipelined around it, and no byte is written behind it."""
    reader, memory, data = ReplyReader(), [], b""
    for value in wanted:
        room = bytearray(b"\xc7" * 4000)
        memory.append(room)
        view = memoryview(room)[:3000]
        step = -(-3000 // pieces)
        reader.expect(
            [Target([view[i : i + step] for i in range(0, 3000, step)]) if not isinstance(value, int) else None]
        )
        data += (
            b":%d\r\n" % value
            if isinstance(value, int)
            else b"$-1\r\n"
            if value is None
            else b"$%d\r\n%b\r\n" % (len(value), value)
        )
    found = feed(reader, data, cuts)
    for value, reply, room in zip(wanted, found, memory, strict=True):
        held = value if isinstance(value, bytes) else b""
        assert reply == (Filled(len(held)) if isinstance(value, bytes) else value)
        assert type(reply) is (Filled if isinstance(value, bytes) else type(value))
        assert room == held + b"\xc7" * (4000 - len(held))


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(["OK", 0, 1, "OK", 0, 1, -1, 10, "", "OKAY", b"", b"+OK\r\n", None, ErrorReply("ERR", "no")]),
        min_size=1,
        max_size=40,
    ),
    st.lists(st.integers(0, 10**6), max_size=12),
    st.sampled_from([b"+OK\r\n", b":1\r\n", b":7\r\n"]),
    st.randoms(use_true_random=False),
)
def test_runs_of_short_replies(wanted: list[Reply], cuts: list[int], more: bytes, rng: random.Random) -> None:
    """Short replies, parsed in runs, are decoded correctly; an unexpected one is refused."""
    reader = ReplyReader()
    reader.expect([None] * len(wanted))
    assert feed(reader, b"".join(encoded(reply, rng) for reply in wanted), cuts) == wanted
    with pytest.raises(ProtocolError):
        feed(reader, more, [])


@settings(max_examples=600)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6), st.booleans())
@example(b"$" + b"9" * 500, [], True)
@example(b"*1000000000\r\n", [], False)
@example(b":1_0\r\n", [], False)
@example(b"%1\r\n|1\r\n+a\r\n+b\r\n", [3], False)
def test_garbage_is_an_error_or_a_reply(data: bytes, cuts: list[int], has_target: bool) -> None:
    """Any bytes give replies or ``ProtocolError``; no other exception, and no write beyond the target."""
    room = bytearray(b"\xc7" * 64)
    reader = ReplyReader()
    for _ in range(3):
        reader.expect([Target([memoryview(room)[:32]]) if has_target else None])
    with contextlib.suppress(ProtocolError):
        feed(reader, data, cuts)
    assert room[32:] == b"\xc7" * 32


@settings(max_examples=400)
@given(st.lists(replies, min_size=1, max_size=4), st.data())
def test_damaged_streams(wanted: list[Reply], data: st.DataObject) -> None:
    """A valid stream with a few changed bytes gives replies or ``ProtocolError``."""
    stream = bytearray(b"".join(encoded(reply, random.Random(1)) for reply in wanted))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    reader = ReplyReader()
    for _ in wanted:
        reader.expect()
    with contextlib.suppress(ProtocolError):
        feed(reader, bytes(stream), [])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"$%d\r\n" % (BULK_BYTES_MAX + 1), id="long string without target"),
        pytest.param(b"+" + b"a" * (LINE_BYTES_MAX + 10), id="endless line"),
        pytest.param(b"+" + b"a" * (LINE_BYTES_MAX + 10) + b"\r\n", id="long line"),
        pytest.param(b"*%d\r\n" % (ELEMENTS_MAX + 1), id="many elements"),
        pytest.param(b"*256\r\n" + (b"*256\r\n" + b":1\r\n" * 256) * 256, id="elements of all levels"),
        pytest.param(b"*1\r\n" * (DEPTH_MAX + 1), id="deep"),
        pytest.param(b"*4000\r\n" + (b"$32000\r\n" + b"x" * 32000 + b"\r\n") * 40, id="heavy"),
        pytest.param(b"$-2\r\n", id="negative length"),
        pytest.param(b"$" + b"0" * 15 + b"5\r\nhello\r\n", id="length of many digits"),
        pytest.param(b"$?\r\n", id="streamed string"),
        pytest.param(b"$+5\r\nhello\r\n", id="signed length"),
        pytest.param(b"$5\r\nhelloXX", id="wrong end"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n", id="another protocol"),
        pytest.param(b":1\r\n:2\r\n", id="an answer too many"),
    ],
)
def test_refused(data: bytes) -> None:
    """Replies that are too long, too deep, malformed or unexpected are refused."""
    reader = ReplyReader()
    reader.expect()
    with pytest.raises(ProtocolError):
        feed(reader, data, [])


@pytest.mark.parametrize("cut", range(25))
def test_short_replies_in_an_array_are_its_elements(cut: int) -> None:
    """An array received in two pieces stays one reply, also if a piece begins with elements like whole replies."""
    reader = ReplyReader()
    reader.expect([None, None])
    assert feed(reader, b"*3\r\n:0\r\n:1\r\n+OK\r\n*1\r\n:1\r\n", [cut]) == [[0, 1, "OK"], [1]]


@pytest.mark.parametrize("has_target", [False, True])
def test_a_short_reply_in_place_of_the_end_of_a_string(has_target: bool) -> None:
    """It is refused, although it arrives in a piece of its own: the length of the string before it is wrong."""
    reader = ReplyReader()
    reader.expect([Target([memoryview(bytearray(3))]) if has_target else None, None])
    assert feed(reader, b"$3\r\nabc", []) == []
    with pytest.raises(ProtocolError, match="does not end where its length says"):
        feed(reader, b":1\r\n", [])


def test_value_longer_than_target() -> None:
    """A value that does not fit is refused by its length, before any byte is written; earlier replies count."""
    room = bytearray(10)
    reader = ReplyReader()
    reader.expect([None, Target([memoryview(room)])])
    with pytest.raises(ReplyTooLongError, match="11 bytes came, expected at most 10") as caught:
        feed(reader, b":5\r\n$11\r\nhello world\r\n", [])
    assert caught.value.replies == [5]
    assert room == bytes(10)


@pytest.mark.parametrize("data", [b">1\r\n+x\r\n", b"|1\r\n+ttl\r\n:3\r\n:7\r\n", b":1\r\n", b"+OK\r\n", b"*0\r\n"])
@pytest.mark.parametrize("expected", [0, 1])
def test_unsolicited_replies_are_refused(data: bytes, expected: int) -> None:
    """Pushes, attributes and surplus answers end the connection at once: no server can keep us busy with them."""
    reader = ReplyReader()
    reader.expect([None] * expected)
    with pytest.raises(ProtocolError):
        feed(reader, data * 2, [])


def test_a_long_value_is_not_copied() -> None:
    """Only the bytes that arrive with a value's length are copied; the rest goes directly into the target."""
    room = bytearray(1 << 20)
    reader = ReplyReader()
    reader.expect([Target([memoryview(room)])])
    head = b"$%d\r\n" % len(room)
    reader.buffers()[0][: len(head)] = head
    reader.advance(len(head))
    first = reader.buffers()[0]
    assert first.nbytes == len(room) and first.obj is room


def test_memory_is_bounded() -> None:
    """A reader of thousands of replies keeps using one buffer."""
    reader = ReplyReader()
    for _ in range(50_000):
        reader.expect()
    assert feed(reader, b":1\r\n" * 25_000 + b":0\r\n" * 25_000, [7, 99_999]) == [1] * 25_000 + [0] * 25_000
    assert sum(buffer.nbytes for buffer in reader.buffers()) <= SCRATCH_BYTES


def test_commands() -> None:
    """Commands are arrays of strings."""
    assert encode_command(b"GET", b"a b") == b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n"
