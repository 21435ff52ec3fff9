"""Answers of an HTTP/1.1 server as they come in: the body of an object goes straight into the buffers for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.backends.s3.failures import Cause, S3Error

__all__ = ["Answer", "AnswerReader"]

_HEAD_BYTES: Final = 2048
"""Bytes asked for at first. What of a body comes with them has to be copied, so that it is no more than a usual head
needs."""

_HEAD_BYTES_MAX: Final = 65536
_TEXT_BYTES_MAX: Final = 4 << 20
"""Longest body outside of the buffers: a page of a thousand long names is a fraction of it."""

_CHUNK: Final = 65536
_CHUNK_DIGITS_MAX: Final = 16
"""Hexadecimal digits of the length of a chunk; servers pad them to eight."""


class Answer:
    """An answer that is whole.

    Attributes:
        status: HTTP status.
        headers: Names in lower case.
        filled_bytes: Length of the body in the buffers.
        body: The body, if it did not go into the buffers.
        reusable: Whether the connection may carry another request.
        surplus: Whether bytes came that belong to no answer.
    """

    __slots__ = ("body", "filled_bytes", "headers", "reusable", "status", "surplus")

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self.filled_bytes = 0
        self.body = b""
        self.reusable = True
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
        self._head = bytearray(_HEAD_BYTES)
        self._head_bytes = 0
        self._chunked = False
        self._rest: int | None = None
        self._into_targets = False
        self._text = bytearray()
        self._scratch = memoryview(b"")
        self.answer: Answer | None = None
        self.whole = False

    @property
    def started(self) -> bool:
        """Whether anything of the answer has come."""
        return self._head_bytes > 0

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes go."""
        if self.answer is None:
            if self._head_bytes == len(self._head):
                # Another one, not this one made longer: the caller may still hold a view of it.
                self._head = self._head + bytes(len(self._head))
            return [memoryview(self._head)[self._head_bytes :]]
        if self._into_targets:
            return _first_bytes(self._targets, self._rest or 0)
        if not self._scratch.nbytes:
            self._scratch = memoryview(bytearray(_CHUNK))
        return [self._scratch if self._rest is None else self._scratch[: self._rest]]

    def advance(self, count: int) -> None:
        """Take note that ``count`` bytes have come into :meth:`buffers`; 0 is the end of the stream.

        Raises:
            S3Error: The answer is broken, or too long for the buffers.
        """
        if not count:
            self._end_of_stream()
        elif self.answer is None:
            self._head_bytes += count
            self._find_head()
        elif self._into_targets:
            self._fill(count)
        else:
            self._take_text(self._scratch[:count])

    def release(self) -> None:
        """Let go of the buffers."""
        self._targets = []

    def _end_of_stream(self) -> None:
        answer = self.answer
        if answer is None:
            cause = Cause.CUT if self.started else Cause.RESET
            raise S3Error(cause, "The service closed the connection before its answer was whole.")
        if self._chunked or self._rest is not None:
            raise S3Error(Cause.CUT, "The service closed the connection within the body of its answer.")
        answer.reusable = False
        self._finish(answer)

    def _find_head(self) -> None:
        end = self._head.find(b"\r\n\r\n", 0, self._head_bytes)
        if end < 0:
            if not b"HTTP/1.".startswith(self._head[: min(7, self._head_bytes)]):
                raise S3Error(Cause.PROTOCOL, "What answers does not speak HTTP.")
            if self._head_bytes >= _HEAD_BYTES_MAX:
                raise S3Error(Cause.PROTOCOL, f"The head of the answer is longer than {_HEAD_BYTES_MAX} bytes.")
            return
        head = self._head[:end].decode("latin-1")
        # Copied: these bytes came along with the head, before it was known where they belong.
        rest = bytes(memoryview(self._head)[end + 4 : self._head_bytes])
        answer = _parse_head(head)
        if answer.status < 200:
            # "100 Continue" and its like: the answer proper follows.
            self._head[: len(rest)] = rest
            self._head_bytes = len(rest)
            self._find_head()
            return
        self.answer = answer
        self._begin_body(answer)
        if self.whole:
            answer.surplus = bool(rest)
            return
        self._take_first(rest)

    def _begin_body(self, answer: Answer) -> None:
        headers = answer.headers
        if self._bodiless or answer.status in (204, 304):
            self._finish(answer)
            return
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length", "")
        if not self._chunked and length:
            if not (length.isascii() and length.isdigit()) or len(length) > 15:
                raise S3Error(Cause.PROTOCOL, "The answer's length is no number.")
            self._rest = int(length)
        if self._targets and answer.status in (200, 206):
            self._begin_object(answer)
        elif self._rest is not None and self._rest > _TEXT_BYTES_MAX:
            raise S3Error(Cause.PROTOCOL, f"An answer of {self._rest} bytes is longer than any text of a service.")
        if self._rest == 0:
            self._finish(answer)

    def _begin_object(self, answer: Answer) -> None:
        if self._rest is None:
            raise S3Error(Cause.PROTOCOL, "The service sends an object without its length.")
        capacity = sum(target.nbytes for target in self._targets)
        if self._rest > capacity:
            raise S3Error(Cause.LENGTH, f"The object has {self._rest} bytes, {capacity} fit.")
        self._into_targets = True

    def _take_first(self, rest: bytes) -> None:
        if not rest or self.answer is None:
            return
        if not self._into_targets:
            self._take_text(memoryview(rest))
            return
        wanted = self._rest or 0
        self.answer.surplus = len(rest) > wanted
        piece = memoryview(rest)[:wanted]
        for target in _first_bytes(self._targets, piece.nbytes):
            target[:] = piece[: target.nbytes]
            piece = piece[target.nbytes :]
        self._fill(min(len(rest), wanted))

    def _fill(self, count: int) -> None:
        answer = self.answer
        if answer is None or self._rest is None:
            return
        answer.filled_bytes += count
        self._rest -= count
        while count:
            first = self._targets[0]
            if count < first.nbytes:
                self._targets[0] = first[count:]
                break
            count -= first.nbytes
            self._targets.pop(0)
        if not self._rest:
            self._finish(answer)

    def _take_text(self, piece: memoryview) -> None:
        answer = self.answer
        if answer is None:
            return
        if self._rest is not None:
            if piece.nbytes > self._rest:
                answer.surplus = True
                piece = piece[: self._rest]
            self._rest -= piece.nbytes
        self._text += piece
        if len(self._text) > _TEXT_BYTES_MAX:
            raise S3Error(Cause.PROTOCOL, f"The answer is longer than {_TEXT_BYTES_MAX} bytes.")
        if self._rest == 0:
            self._finish(answer)
        elif self._chunked and self._text.endswith(b"\r\n\r\n"):
            body = _unchunked(self._text)
            if body is not None:
                self._text = bytearray(body)
                self._finish(answer)

    def _finish(self, answer: Answer) -> None:
        answer.body = bytes(self._text)
        if answer.headers.get("connection", "").lower() == "close" or answer.headers.get(":version") == "1.0":
            answer.reusable = False
        self.whole = True


def _parse_head(text: str) -> Answer:
    """Return an answer's status and headers."""
    first, *lines = text.split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or parts[0] not in ("HTTP/1.1", "HTTP/1.0") or not (len(parts[1]) == 3 and parts[1].isdecimal()):
        raise S3Error(Cause.PROTOCOL, "What answers does not speak HTTP.")
    headers = {":version": parts[0][5:]}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise S3Error(Cause.PROTOCOL, "A line in the head of the answer is no header.")
        headers[name.strip().lower()] = value.strip()
    return Answer(int(parts[1]), headers)


def _first_bytes(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return views of the first ``count`` bytes of buffers."""
    found = []
    for buffer in buffers:
        if not count:
            break
        found.append(buffer[:count])
        count -= found[-1].nbytes
    return found


def _unchunked(text: bytearray) -> bytes | None:
    """Return a chunked body in one piece, None if its end has not come."""
    body: list[bytes] = []
    at = 0
    while (line := text.find(b"\r\n", at)) >= 0:
        digits = text[at:line].split(b";")[0].strip()
        # Digits alone: Python would take a sign, too, and a negative length leads back to where it was read.
        if not 0 < len(digits) <= _CHUNK_DIGITS_MAX or digits.strip(b"0123456789abcdefABCDEF"):
            raise S3Error(Cause.PROTOCOL, "A chunk of the answer has no length.")
        size = int(digits, 16)
        if not size:
            return b"".join(body)
        at = line + 2 + size + 2
        if at > len(text):
            return None
        body.append(bytes(text[line + 2 : line + 2 + size]))
    return None
