"""HTTP answers: in pieces of any length, complete, broken, or too long."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.http import Answer

BODY = bytes(range(256)) * 20


def feed(reader: Answer, data: bytes, most: int = 1 << 20, *, end: bool = False) -> Answer | None:
    """Feed bytes to a reader, ``most`` at a time, until it has its answer; then the end of the stream."""
    rest = memoryview(data)
    while rest and not reader.whole:
        taken = 0
        for buffer in reader.buffers():
            part = rest[taken : taken + min(buffer.nbytes, most - taken)]
            buffer[: part.nbytes] = part
            taken += part.nbytes
            if taken == most or part.nbytes < buffer.nbytes:
                break
        reader.advance(taken)
        rest = rest[taken:]
    if end and not reader.whole:
        reader.advance(0)
    return reader if reader.whole else None


def head(status: int = 200, **headers: object) -> bytes:
    """Return the head of an answer."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode()


def buffers(*lengths: int) -> list[memoryview]:
    """Return buffers of these lengths."""
    return [memoryview(bytearray(length)) for length in lengths]


def joined(targets: Sequence[memoryview], count: int) -> bytes:
    """Return the first bytes of buffers."""
    return b"".join(targets)[:count]


def test_body_into_buffers(rng: random.Random) -> None:
    """However the bytes are split, the body goes into the buffers, and no byte is written behind them."""
    for _ in range(200):
        size = rng.choice((1, 5, 2040, 2048, 4000, len(BODY)))
        targets = buffers(rng.choice((0, 1, 256)), rng.randrange(1, 3000), len(BODY))
        reader = Answer(targets)
        data = head(Content_Length=size, ETag='"e"', Pad="x" * rng.choice((0, 100, 3000))) + BODY[:size]
        answer = feed(reader, data, rng.choice((1, 7, 100, 1 << 20)))
        assert (answer.status, answer.filled_bytes, answer.headers["etag"]) == (200, size, '"e"')
        assert answer.stays_open
        assert joined(targets, size) == BODY[:size]
        assert not any(b"".join(targets)[size:]), "bytes behind the body"


def test_longer_than_buffers() -> None:
    """An object that does not fit is refused by its length, before any byte of it is read."""
    targets = buffers(100, 100)
    with pytest.raises(S3Error) as caught:
        feed(Answer(targets), head(Content_Length=201) + bytes([1]) * 201)
    assert caught.value.cause is Cause.LENGTH
    assert not any(b"".join(targets))


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", Cause.RESET),
        (b"HTTP/1.1 200", Cause.CUT),
        (head(Content_Length=10) + b"12345", Cause.CUT),
        (head(Transfer_Encoding="chunked"), Cause.PROTOCOL),
        (head(404, Transfer_Encoding="chunked") + b"5\r\nabc", Cause.CUT),
        (head(404, Transfer_Encoding="chunked") + b"x\r\n\r\n\r\n", Cause.PROTOCOL),
        (b"SSH-2.0-OpenSSH\r\n", Cause.PROTOCOL),
        (b"HTTP/1.1 101 Other\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", Cause.PROTOCOL),
        (b"HTTP/2 200 OK\r\n\r\n", Cause.PROTOCOL),
        (b"HTTP/1.1 20x OK\r\n\r\n", Cause.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", Cause.PROTOCOL),
        (head(Content_Length="-5"), Cause.PROTOCOL),
        (head(Content_Length="9" * 30), Cause.PROTOCOL),
        (head(), Cause.PROTOCOL),
        (head(404, Content_Length=10**9), Cause.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20000, Cause.PROTOCOL),
        (head(404) + b"x" * (5 << 20), Cause.PROTOCOL),
        (head(404, Transfer_Encoding="chunked") + b"+2\r\nhe\r\n0\r\n\r\n", Cause.PROTOCOL),
        # A negative length would lead back to its own position, for ever.
        (head(404, Transfer_Encoding="chunked") + b"-6\r\nhello\r\n0\r\n\r\n", Cause.PROTOCOL),
        (head(404, Transfer_Encoding="chunked") + b"f" * 17 + b"\r\nhello\r\n0\r\n\r\n", Cause.PROTOCOL),
    ],
)
def test_broken_answers(data: bytes, cause: Cause) -> None:
    """Each kind of invalid answer is a failure with its own cause."""
    with pytest.raises(S3Error) as caught:
        feed(Answer(buffers(256, 4096)), data, end=True)
    assert caught.value.cause is cause


def test_texts() -> None:
    """The body of a failure is kept, whether its length is declared, it is chunked, or it ends with the stream."""
    for data, reusable in (
        (head(404, Content_Length=5) + b"hello", True),
        (head(404, Transfer_Encoding="chunked") + b"2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", True),
        (head(404) + b"hello", False),
        (head(404, Content_Length=5, Connection="close") + b"hello", False),
        (head(404, Content_Length=5) + b"hellohello", False),
    ):
        for most in (1, 1 << 20):
            answer = feed(Answer(buffers(10)), data, most, end=True)
            assert answer.text == "hello"
            if most > 1:
                assert (answer.stays_open and not answer.surplus) is reusable, data


def test_without_body() -> None:
    """An answer to HEAD has a length and no body; an interim answer is skipped."""
    reader = Answer(bodiless=True)
    answer = feed(reader, b"HTTP/1.1 100 Continue\r\n\r\n" + head(200, Content_Length=77))
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "77", b"")


def test_a_body_of_an_answer_without_one_is_surplus() -> None:
    """Bytes after the head of an answer to HEAD belong to no answer: later bytes cannot be trusted."""
    answer = Answer(bodiless=True)
    feed(answer, head(Content_Length=5) + b"hello")
    assert answer.whole and answer.surplus and answer.body == b""


def test_a_surplus_answer_changes_nothing_of_the_first() -> None:
    """Received together with the first, it gives neither its status nor its connection to it."""
    answer = feed(Answer(), head(404, Content_Length=0) + head(200, Content_Length=0, Connection="close"))
    assert answer is not None and answer.surplus
    assert (answer.status, answer.stays_open, answer.headers["content-length"]) == (404, True, "0")


def test_surplus_bytes() -> None:
    """Surplus bytes after the body prevent reuse of the connection."""
    targets = buffers(100)
    answer = feed(Answer(targets), head(Content_Length=5) + b"hellohello")
    assert answer.surplus
    assert joined(targets, 10) == b"hello" + bytes(5)


def test_any_bytes(rng: random.Random) -> None:
    """For any damaged or random bytes, the reader answers or fails with a cause, and keeps within its limits."""
    whole = head(Content_Length=300, ETag="x") + BODY[:300]
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data) if rng.random() < 0.5 else 50)] = rng.randrange(256)
        targets = buffers(256, 300)
        try:
            answer = feed(Answer(targets), bytes(data), rng.choice((1, 9, 4096)), end=True)
        except S3Error:
            continue
        assert answer.filled_bytes <= 556


def test_interim_answers_are_few() -> None:
    """A server that keeps sending interim answers is refused, however these are split; a few are skipped."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    for most in (1, 1 << 20):
        answer = feed(Answer(buffers(10)), interim * 8 + head(200, Content_Length=5) + b"hello", most)
        assert (answer.status, answer.filled_bytes) == (200, 5)
        for count in (9, 3000):
            with pytest.raises(S3Error) as caught:
                feed(Answer(), interim * count, most)
            assert caught.value.cause is Cause.PROTOCOL


def test_a_text_in_tiny_chunks_is_refused() -> None:
    """Chunks of one byte cost a call each: such a body is soon refused."""
    reader = Answer()
    whole = head(404, Transfer_Encoding="chunked") + b"1\r\nA\r\n" * 100_000
    with pytest.raises(S3Error) as caught:
        feed(reader, whole)
    assert caught.value.cause is Cause.PROTOCOL
    assert len(reader.body) < 32 * 1024
    # A list as services send it is accepted.
    chunks = b"".join(b"%x\r\n" % 1024 + b"x" * 1024 + b"\r\n" for _ in range(4000))
    answer = feed(Answer(), head(200, Transfer_Encoding="chunked") + chunks + b"0\r\n\r\n")
    assert len(answer.body) == 4000 * 1024


def test_an_answer_of_two_lengths_is_refused() -> None:
    """If a proxy and we could disagree on the end of an answer, the answer is refused."""
    for lines in (b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: 5\r\nTransfer-Encoding: chunked"):
        with pytest.raises(S3Error) as caught:
            feed(Answer(buffers(10)), b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n\r\nhello", end=True)
        assert caught.value.cause is Cause.PROTOCOL


def test_trailers_are_no_headers() -> None:
    """Trailers after the last chunk do not change the headers."""
    data = head(404, Transfer_Encoding="chunked", ETag="right") + b"0\r\netag: wrong\r\n\r\n"
    answer = feed(Answer(), data)
    assert answer.headers["etag"] == "right"


def test_headers_of_an_interim_answer_are_ignored() -> None:
    """Headers of an interim answer do not apply to the final answer."""
    early = b"HTTP/1.1 103 Early Hints\r\netag: wrong\r\n\r\n"
    answer = feed(Answer(bodiless=True), early + head(200, Content_Length=5))
    assert (answer.headers, answer.stays_open) == ({"content-length": "5"}, True)


def test_the_beginning_of_another_answer_is_surplus() -> None:
    """Bytes that could start an unrequested answer cost the connection like any others."""
    for whole in (head(404, Content_Length=5) + b"hello", head(404, Content_Length=0)):
        answer = feed(Answer(), whole + b"HTTP/1.1 200 OK\r\n")
        assert answer.surplus
