"""Answers of an HTTP/1.1 server as they come in: the body of an object goes straight into the buffers for it.

httptools (llhttp, the parser of Node.js) reads heads, texts and chunks. Ours is only where bytes go: once the head of
an object has been read, the rest of its body is received into the buffers, and no parser sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import httptools

from kvstore.backends.s3.failures import Cause, S3Error

__all__ = ["TEXT_BYTES_MAX", "Answer", "AnswerReader"]

_HEAD_BYTES: Final = 2048
"""Bytes asked for at first. What of a body comes with them has to be copied, so that it is no more than a usual head
needs."""

_HEAD_BYTES_MAX: Final = 65536

TEXT_BYTES_MAX: Final = 4 << 20
"""Longest body outside of the buffers: a page of a thousand long names is a fraction of it."""

_TEXT_PIECES_MAX: Final = 16384
"""Chunks and receives that such a body may come in: each costs a call, and services send chunks of kilobytes."""

_INTERIM_MAX: Final = 8
"""Answers such as "100 Continue" before the one proper."""

_ROOM_BYTES: Final = 65536
_KEPT: Final = frozenset({b"content-length", b"etag", b"last-modified", b"transfer-encoding", b"connection"})


class Answer:
    """An answer that is whole.

    Attributes:
        status: HTTP status.
        headers: Those of interest to us, names in lower case.
        filled_bytes: Length of the body in the buffers.
        body: The body, if it did not go into the buffers.
        reusable: Whether the connection may carry another request.
        surplus: Whether bytes came that belong to no answer.
    """

    __slots__ = ("body", "filled_bytes", "headers", "reusable", "status", "surplus")

    def __init__(self, status: int, headers: dict[str, str], *, reusable: bool) -> None:
        self.status = status
        self.headers = headers
        self.filled_bytes = 0
        self.body = b""
        self.reusable = reusable
        self.surplus = False

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")


class AnswerReader:
    """Understands one answer. Plain decisions: says where the next bytes should go, and is told how many came.

    Args:
        targets: Buffers for the body of a success; without them it is kept in memory.
        bodiless: Whether no body follows, whatever the head says (an answer to HEAD).
    """

    def __init__(self, targets: Sequence[memoryview] = (), *, bodiless: bool = False) -> None:
        self._targets = [target for target in targets if target.nbytes]
        self._bodiless = bodiless
        self._events: _Events | None = _Events()
        self._room = memoryview(bytearray(_HEAD_BYTES))
        self._received = 0
        self._rest: int | None = None
        """Bytes of the object that are still to come; None where the body does not go into the buffers."""
        self.answer: Answer | None = None
        self.whole = False

    @property
    def started(self) -> bool:
        """Whether anything of the answer has come."""
        return self._received > 0

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes go."""
        return [self._room] if self._rest is None else _first_bytes(self._targets, self._rest)

    def advance(self, count: int) -> None:
        """Take note that ``count`` bytes have come into :meth:`buffers`; 0 is the end of the stream.

        Raises:
            S3Error: The answer is broken, or too long for the buffers.
        """
        if not count:
            self._end_of_stream()
        elif self._rest is not None:
            self._fill(count)
        elif self._events is not None:
            self._received += count
            self._read(self._events, self._room[:count])

    def release(self) -> None:
        """Let go of the buffers."""
        self._targets = []
        self._events = None

    def _read(self, events: _Events, piece: memoryview) -> None:
        try:
            events.parser.feed_data(piece)
        except httptools.HttpParserError as error:
            if not events.complete:
                raise S3Error(Cause.PROTOCOL, f"The answer is no HTTP: {type(error).__name__}.") from None
            events.surplus = True
        if self.answer is None:
            if events.status is None:
                if self._received > _HEAD_BYTES_MAX or events.interim > _INTERIM_MAX:
                    raise S3Error(Cause.PROTOCOL, f"The head of the answer is longer than {_HEAD_BYTES_MAX} bytes.")
                return
            self._begin(events, Answer(events.status, events.headers, reusable=events.may_stay_open(self._bodiless)))
            if self._rest is not None:
                return
        if events.text_bytes > TEXT_BYTES_MAX or len(events.text) > _TEXT_PIECES_MAX:
            raise S3Error(Cause.PROTOCOL, "An answer is longer, or in more pieces, than any text of a service.")
        if events.complete or self._bodiless:
            self._finish(events)

    def _begin(self, events: _Events, answer: Answer) -> None:
        """Decide where the body goes, now that the head is known."""
        self.answer = answer
        if self._bodiless:
            return
        length = int(answer.headers.get("content-length", -1))
        if not self._targets or answer.status not in (200, 206):
            if length > TEXT_BYTES_MAX:
                raise S3Error(Cause.PROTOCOL, f"An answer of {length} bytes is longer than any text of a service.")
            self._room = memoryview(bytearray(_ROOM_BYTES))
            return
        if length < 0:
            raise S3Error(Cause.PROTOCOL, "The service sends an object without its length.")
        capacity = sum(target.nbytes for target in self._targets)
        if length > capacity:
            raise S3Error(Cause.LENGTH, f"The object has {length} bytes, {capacity} fit.")
        self._rest = length
        # Copied: these bytes came along with the head, before it was known where they belong.
        for piece in events.text:
            rest = memoryview(piece)
            for target in _first_bytes(self._targets, rest.nbytes):
                target[:] = rest[: target.nbytes]
                rest = rest[target.nbytes :]
            self._fill(len(piece))
        if not length:
            self.whole = True
        answer.surplus = events.surplus
        self._events = None

    def _fill(self, count: int) -> None:
        if self.answer is None or self._rest is None:
            return
        self.answer.filled_bytes += count
        self._rest -= count
        while count:
            first = self._targets[0]
            if count < first.nbytes:
                self._targets[0] = first[count:]
                break
            count -= first.nbytes
            self._targets.pop(0)
        self.whole = not self._rest

    def _finish(self, events: _Events) -> None:
        if self.answer is not None:
            if self._bodiless:
                events.surplus |= bool(events.text)
            else:
                self.answer.body = b"".join(events.text)
            self.answer.surplus = events.surplus
        self.whole = True
        self._events = None

    def _end_of_stream(self) -> None:
        if self.answer is None or self._events is None:
            inside = self.answer is not None or self.started
            raise S3Error(Cause.CUT if inside else Cause.RESET, "The service closed the connection before its answer.")
        headers = self.answer.headers
        if "content-length" in headers or "transfer-encoding" in headers:
            raise S3Error(Cause.CUT, "The service closed the connection within the body of its answer.")
        self.answer.reusable = False
        self._finish(self._events)


class _Events:
    """What httptools reports of one answer; it calls these methods while it is fed."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.text: list[bytes] = []
        self.text_bytes = 0
        self.interim = 0
        self.complete = False
        self.surplus = False
        self._stays_open = False

    def may_stay_open(self, bodiless: bool) -> bool:
        """Return whether the connection may carry another request."""
        if bodiless:
            # Without a length the parser takes the answer to last until the end of the stream.
            return self.headers.get("connection", "").lower() != "close" and self.parser.get_http_version() == "1.1"
        return self._stays_open

    def on_message_begin(self) -> None:
        """Note an answer; a second one is nobody's."""
        self.surplus |= self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep what is of interest; fields after the body are not."""
        name = name.lower()
        if self.status is None and name in _KEPT:
            self.headers[name.decode()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Take the status, unless it is that of an interim answer."""
        status = self.parser.get_status_code()
        if self.status is None and status < 200:
            self.interim += 1
            self.headers = {}
        elif self.status is None:
            self.status = status
            self._stays_open = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body, as far as it may be long."""
        if not self.complete and self.text_bytes <= TEXT_BYTES_MAX and len(self.text) <= _TEXT_PIECES_MAX:
            self.text.append(body)
            self.text_bytes += len(body)

    def on_message_complete(self) -> None:
        """Note the end of the answer proper."""
        self.complete = self.status is not None


def _first_bytes(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return views of the first ``count`` bytes of buffers."""
    found = []
    for buffer in buffers:
        if not count:
            break
        found.append(buffer[:count])
        count -= found[-1].nbytes
    return found
