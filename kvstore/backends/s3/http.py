"""Answers of an HTTP/1.1 server as they come in: the body of an object goes straight into the buffers for it.

httptools (llhttp, the parser of Node.js) reads heads, texts and chunks. Ours is only where bytes go: once the head of
an object has been read, the rest of its body is received into the buffers, and no parser sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import httptools

from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.vectored import cut, drop_front, scatter

__all__ = ["TEXT_BYTES_MAX", "Answer"]

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
_KEPT: Final = frozenset(
    {b"content-length", b"content-range", b"etag", b"last-modified", b"transfer-encoding", b"connection"}
)


class Answer:
    """One answer. No I/O: it says where the next bytes should go, and is given how many came.

    The body of a success goes into ``targets``, if there are any; every other body is kept in memory. With ``bodiless``
    none follows, whatever the head says (an answer to HEAD).

    Attributes:
        status: HTTP status; 0 until the head is whole.
        headers: Those of interest to us, names in lower case.
        filled_bytes: Length of the body in the buffers, as far as it has come.
        whole: Whether it has come to its end.
        surplus: Whether bytes came that belong to no answer.
        stays_open: Whether the connection may carry another request.
    """

    def __init__(self, targets: Sequence[memoryview] = (), *, bodiless: bool = False) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.filled_bytes = 0
        self.whole = False
        self.surplus = False
        self.stays_open = False
        self._targets = [target for target in targets if target.nbytes]
        self._bodiless = bodiless
        # It calls the methods that begin with on_. Until the answer is whole: the two hold each other.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._room = memoryview(bytearray(_HEAD_BYTES))
        self._head_bytes = 0
        self._interim = 0
        self._text: list[bytes] = []
        self._text_bytes = 0
        self._parsed = False
        # Of the object, what is still to come; None where the body does not go into the buffers.
        self._rest: int | None = None

    @property
    def started(self) -> bool:
        """Whether anything of it has come."""
        return self._head_bytes > 0

    @property
    def body(self) -> bytes:
        """The body, if it did not go into the buffers."""
        return b"".join(self._text)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes go."""
        return [self._room] if self._rest is None else cut(self._targets, self._rest)

    def advance(self, count: int) -> None:
        """Take note that ``count`` bytes came into :meth:`buffers`, 0 at the end; S3Error if the answer is broken."""
        if not count:
            self._end_of_stream()
        elif self._rest is not None:
            self._fill(count)
        elif self._parser is not None:
            self._read(self._parser, self._room[:count])

    def release(self) -> None:
        """Let go of the buffers."""
        self._targets = []
        self._parser = None

    def _read(self, parser: httptools.HttpResponseParser, piece: memoryview) -> None:
        is_new = not self.status
        try:
            parser.feed_data(piece)
        # The second, of an answer 101, is not a kind of the first.
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._parsed:
                raise S3Error(Cause.PROTOCOL, f"The answer is no HTTP: {type(error).__name__}.") from None
            self.surplus = True
        if is_new:
            self._head_bytes += piece.nbytes
            if not self.status:
                if self._head_bytes > _HEAD_BYTES_MAX or self._interim > _INTERIM_MAX:
                    raise S3Error(Cause.PROTOCOL, f"The head of the answer is longer than {_HEAD_BYTES_MAX} bytes.")
                return
            self._choose_target(parser)
            if self._rest is not None:
                return
        if self._text_bytes > TEXT_BYTES_MAX or len(self._text) > _TEXT_PIECES_MAX:
            raise S3Error(Cause.PROTOCOL, "An answer is longer, or in more pieces, than any text of a service.")
        if self._parsed or self._bodiless:
            self._finish()

    def _choose_target(self, parser: httptools.HttpResponseParser) -> None:
        """Decide where the body goes, now that the head is known."""
        if self._bodiless:
            # Without a length the parser takes the answer to last until the end of the stream.
            closes = self.headers.get("connection", "").lower() == "close"
            self.stays_open = not closes and parser.get_http_version() == "1.1"
            return
        length = int(self.headers.get("content-length", -1))
        if not self._targets or self.status not in (200, 206):
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
        self._fill(scatter(self.body, self._targets))
        self._text = []
        self._parser = None

    def _fill(self, count: int) -> None:
        if self._rest is None:
            return
        self.filled_bytes += count
        self._rest -= count
        drop_front(self._targets, count)
        self.whole = not self._rest

    def _finish(self) -> None:
        if self._bodiless and self._text:
            self.surplus, self._text = True, []
        self.whole = True
        self._parser = None

    def _end_of_stream(self) -> None:
        if not self.started:
            raise S3Error(Cause.RESET, "The service closed the connection before its answer.")
        if not self.status or "content-length" in self.headers or "transfer-encoding" in self.headers:
            raise S3Error(Cause.CUT, "The service closed the connection within its answer.")
        self.stays_open = False
        self._finish()

    def on_message_begin(self) -> None:
        """Called by the parser; a second answer belongs to no request."""
        self.surplus |= self._parsed

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser; fields after the body count for nothing."""
        name = name.lower()
        if not self.status and name in _KEPT:
            self.headers[name.decode()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser; an interim answer counts for nothing."""
        if self._parser is None or self.status:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            self.headers = {}
        else:
            self.status = status
            self.stays_open = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Called by the parser; a piece is kept as long as the body may become longer."""
        if not self._parsed and self._text_bytes <= TEXT_BYTES_MAX and len(self._text) <= _TEXT_PIECES_MAX:
            self._text.append(body)
            self._text_bytes += len(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._parsed = self.status > 0
