"""RESP 2, the wire protocol of Redis and Valkey: encoding of commands and parsing of replies, without I/O.

Only version 2: every server and proxy supports it, and no command used here needs version 3. It has no push messages,
so an unrequested reply is an error that ends the connection.

The reader provides the memory for the next bytes. During a value, that memory is the caller's target (a slot), so the
kernel writes the value directly. Format: https://redis.io/docs/latest/develop/reference/protocol-spec/.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from kvstore.backends.vectored import cut, drop_front, scatter

SCRATCH_BYTES: Final = 65536
"""Size of a receive when no value is expected: several thousand short replies."""

AHEAD_BYTES: Final = 320
"""Size of a receive before a value: its length line, the 256 bytes of a record header, and little of the payload,
because these bytes are copied into the slot."""

LINE_BYTES_MAX: Final = 4096
BULK_BYTES_MAX: Final = 32768
REPLY_BYTES_MAX: Final = 1 << 20
ELEMENTS_MAX: Final = 1 << 16
DEPTH_MAX: Final = 8
"""Bounds of a reply without a target: bytes of a line, bytes of a string, total bytes, total elements, and nesting of
arrays. The longest is the slot map of a cluster of a thousand nodes, with a few hundred thousand bytes."""

_CRLF: Final = b"\r\n"
_SHORT_STARTS: Final = b":+"
_SHORT: Final[dict[bytes, int | str]] = {b":0": 0, b":1": 1, b"+OK": "OK"}
_LENGTH_DIGITS_MAX: Final = 15
_INTEGER_DIGITS_MAX: Final = 20


class ProtocolError(Exception):
    """The bytes are not RESP 2, or unrequested; the connection must be closed. ``replies`` preceded the error."""

    replies: Sequence[Reply] = ()


class ReplyTooLongError(ProtocolError):
    """A value is longer than its target; none of it was received."""


class ErrorReply(NamedTuple):
    """An error from the server: ``code`` is the first word (``MOVED``, ``OOM``), ``message`` the rest."""

    code: str
    message: str


class Filled(int):
    """Length in bytes of a value received completely into its target."""


Reply: TypeAlias = "int | bytes | str | ErrorReply | Filled | list[Reply] | None"
"""Simple strings are ``str``, bulk strings ``bytes``."""


class Target:
    """Destination of a value: writable buffers, filled in order."""

    __slots__ = ("buffers", "capacity_bytes")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = [buffer for buffer in buffers if buffer.nbytes]
        self.capacity_bytes = sum([buffer.nbytes for buffer in self.buffers])


def encode_command(*args: bytes) -> bytes:
    return b"*%d\r\n" % len(args) + encode_arguments(*args)


def encode_arguments(*args: bytes) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args])


class ReplyReader:
    """Incremental parser of replies.

    Call :meth:`expect` for each command sent, receive into :meth:`buffers`, and pass the count to :meth:`advance`.
    Constants of this module bound its memory for any input. After an error it is unusable.
    """

    def __init__(self) -> None:
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0
        self._end = 0
        self._expected: deque[Target | type | None] = deque()
        # Incomplete arrays: the total number of elements, and the elements received.
        self._stack: list[tuple[int, list[Reply]]] = []
        self._elements = 0
        self._bytes = 0
        # The current string: its length, missing bytes and their destination, and its memory if it has no target.
        self._value_bytes: int | None = None
        self._value_missing = 0
        self._value_buffers: list[memoryview] = []
        self._string: bytearray | None = None

    def expect(self, wanted: Iterable[Target | type | None] = (None,)) -> None:
        """Announce the next replies: the target for a bulk string, the type of another reply, or None for any.

        Other strings and arrays are protocol errors.
        """
        self._expected.extend(wanted)

    def buffers(self) -> list[memoryview]:
        """Return the buffers for the next bytes, in order; never empty."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._value_missing:
            return [*self._value_buffers, self._view[:AHEAD_BYTES]]
        if self._start and SCRATCH_BYTES - self._end < AHEAD_BYTES:
            # Moves less than one reply, and only at the end of the scratch memory.
            self._scratch[: self._end - self._start] = self._scratch[self._start : self._end]
            self._end -= self._start
            self._start = 0
        is_value_next = self._expected and isinstance(self._expected[0], Target) and not self._stack
        return [self._view[self._end : self._end + (AHEAD_BYTES if is_value_next else SCRATCH_BYTES)]]

    def advance(self, count: int) -> list[Reply]:
        """Process ``count`` received bytes and return the replies completed by them; else raise ProtocolError."""
        in_value = min(count, self._value_missing)
        if in_value:
            self._fill(in_value)
        self._end += count - in_value
        replies: list[Reply] = []
        self._take_short(replies)
        try:
            while self._start < self._end and self._step(replies):
                pass
        except ProtocolError as error:
            error.replies = replies
            raise
        return replies

    def _fill(self, count: int) -> None:
        """Account for bytes received into the target."""
        self._value_missing -= count
        if self._value_missing:
            drop_front(self._value_buffers, count)
        else:
            self._value_buffers = []

    def _take_short(self, replies: list[Reply]) -> None:
        """Parse a run of ``:0``, ``:1`` and ``+OK`` in one pass: the replies to EXISTS and SET."""
        if self._value_bytes is not None or self._stack:
            return
        if self._start == self._end or self._scratch[self._start] not in _SHORT_STARTS:
            return
        for line in bytes(self._view[self._start : self._end]).split(_CRLF)[:-1]:
            reply = _SHORT.get(line)
            if reply is None or not self._expected:
                return
            self._start += len(line) + 2
            self._expected.popleft()
            replies.append(reply)

    def _step(self, replies: list[Reply]) -> bool:
        """Parse one item in the scratch memory; return whether there may be more."""
        if self._value_bytes is not None:
            return self._end_string(self._value_bytes, replies)
        at = self._scratch.find(_CRLF, self._start, self._end)
        if (at if at >= 0 else self._end) - self._start > LINE_BYTES_MAX:
            raise ProtocolError(f"a line is longer than {LINE_BYTES_MAX} bytes")
        if at < 0:
            return False
        kind, rest = self._scratch[self._start], bytes(self._view[self._start + 1 : at])
        self._start = at + 2
        if not self._expected:
            raise ProtocolError("a reply came without a question")
        self._account(len(rest))
        match chr(kind):
            case "$":
                self._begin_string(rest, replies)
            case ":":
                self._emit(_integer(rest), replies)
            case "+":
                self._emit(rest.decode("utf-8", "replace"), replies)
            case "-":
                code, _, message = rest.decode("utf-8", "replace").partition(" ")
                self._emit(ErrorReply(code, message), replies)
            case "*":
                self._begin_array(rest, replies)
            case other:
                raise ProtocolError(f"no type of reply begins with {other!r}")
        return True

    def _begin_string(self, rest: bytes, replies: list[Reply]) -> None:
        if rest == b"-1":
            self._emit(None, replies)
            return
        length = _length(rest)
        target = self._expected[0]
        if self._stack or not isinstance(target, Target):
            if target is int or target is str:
                raise ProtocolError("a value came where none is expected")
            if length > BULK_BYTES_MAX:
                raise ProtocolError(f"a string of {length} bytes came where at most {BULK_BYTES_MAX} are expected")
            self._account(length)
            self._string = bytearray(length)
            target = Target([memoryview(self._string)])
        elif length > target.capacity_bytes:
            raise ReplyTooLongError(f"a value of {length} bytes came, expected at most {target.capacity_bytes}")
        self._value_bytes = self._value_missing = length
        self._value_buffers = target.buffers[:] if length == target.capacity_bytes else cut(target.buffers, length)
        # Bytes received together with the length line: at most ``AHEAD_BYTES`` if a value was next.
        have = min(self._end - self._start, length)
        if have:
            scatter(self._view[self._start : self._start + have], self._value_buffers)
            self._start += have
            self._fill(have)

    def _end_string(self, length: int, replies: list[Reply]) -> bool:
        if self._value_missing or self._end < self._start + 2:
            return False
        if self._scratch[self._start : self._start + 2] != _CRLF:
            raise ProtocolError("a string does not end where its length says")
        self._start += 2
        string, self._value_bytes, self._string = self._string, None, None
        self._emit(Filled(length) if string is None else bytes(string), replies)
        return True

    def _begin_array(self, rest: bytes, replies: list[Reply]) -> None:
        count = 0 if rest == b"-1" else _length(rest)
        if self._expected[0] is not None:
            raise ProtocolError("an array came where none is expected")
        self._elements += count
        if self._elements > ELEMENTS_MAX or len(self._stack) >= DEPTH_MAX:
            raise ProtocolError(f"a reply has more than {ELEMENTS_MAX} elements or {DEPTH_MAX} levels")
        if count:
            self._stack.append((count, []))
        else:
            self._emit(None if rest == b"-1" else [], replies)

    def _emit(self, value: Reply, replies: list[Reply]) -> None:
        """Process a complete value, and the arrays that it completes."""
        while self._stack:
            count, items = self._stack[-1]
            items.append(value)
            if len(items) < count:
                return
            self._stack.pop()
            value = items
        self._expected.popleft()
        self._elements = self._bytes = 0
        replies.append(value)

    def _account(self, count: int) -> None:
        self._bytes += count
        if self._bytes > REPLY_BYTES_MAX:
            raise ProtocolError(f"a reply is longer than {REPLY_BYTES_MAX} bytes")


def _length(text: bytes) -> int:
    if not text.isdigit() or len(text) > _LENGTH_DIGITS_MAX:
        raise ProtocolError(f"{text[:20]!r} is not a length")
    return int(text)


def _integer(text: bytes) -> int:
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if not digits.isdigit() or len(digits) > _INTEGER_DIGITS_MAX:
        raise ProtocolError(f"{text[:20]!r} is not an integer")
    return int(text)
