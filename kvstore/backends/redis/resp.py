"""RESP 2: the wire protocol of Redis and Valkey. Bytes in, replies out; nothing here does I/O.

Version 2 and no other, as every server and proxy speaks it, and nothing that is asked here is answered in a type that
only version 3 has. It knows no pushes: whatever was not asked for is an error, so that a server can't keep us busy.

The reader hands out the memory that the next bytes are to be received into. While a value is under way that memory is
the caller's own (a slot), so that a value is written once, by the kernel. Format: https://redis.io/docs/latest/develop/reference/protocol-spec/.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = [
    "ErrorReply",
    "Filled",
    "ProtocolError",
    "Reply",
    "ReplyReader",
    "ReplyTooLongError",
    "Target",
    "encode_command",
    "flat",
]

SCRATCH_BYTES: Final = 65536
"""Received at once where no value is expected: some thousand short replies."""

AHEAD_BYTES: Final = 320
"""Received at once where a value is expected next: its length line, the 256 bytes of a record's header, and little of
its payload, as whatever lands here has to be copied into the slot."""

LINE_BYTES_MAX: Final = 4096
"""Longest line; errors of servers have some hundred bytes."""

BULK_BYTES_MAX: Final = 32768
"""Longest string that has no target: names and versions in the answer to HELLO."""

REPLY_BYTES_MAX: Final = 262144
"""Most bytes of one reply that goes to no target, all elements together."""

ELEMENTS_MAX: Final = 4096
"""Most elements of one reply, all levels together."""

DEPTH_MAX: Final = 8
"""Deepest nesting; what is asked here needs four."""

_CRLF: Final = b"\r\n"
_SHORT_STARTS: Final = b":+"
_SHORT: Final[dict[bytes, int | str]] = {b":0": 0, b":1": 1, b"+OK": "OK"}
_LENGTH_DIGITS_MAX: Final = 15
_INTEGER_DIGITS_MAX: Final = 20


class ProtocolError(Exception):
    """What the server sent is no RESP 2, or more than was asked for; the connection can't be used any more."""


class ReplyTooLongError(ProtocolError):
    """A value is longer than its target. ``size_bytes`` is its length; none of it was received into the target."""

    def __init__(self, size_bytes: int, capacity_bytes: int) -> None:
        super().__init__(f"a value of {size_bytes} bytes came, expected at most {capacity_bytes}")
        self.size_bytes = size_bytes


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server refused: ``code`` is the first word (``MOVED``, ``OOM``), ``message`` the rest."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Filled:
    """A value lies in its target, whole: this many bytes."""

    size_bytes: int


Reply: TypeAlias = "int | bytes | str | ErrorReply | Filled | list[Reply] | None"
"""Simple strings are ``str``, bulk strings ``bytes``."""


class Target:
    """Where a value goes: writable buffers, filled one after the other."""

    __slots__ = ("buffers", "capacity_bytes")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = [flat(buffer) for buffer in buffers]
        self.capacity_bytes = sum([buffer.nbytes for buffer in self.buffers])


def flat(buffer: memoryview) -> memoryview:
    """Return a buffer as one row of bytes."""
    return buffer if buffer.ndim == 1 and buffer.format == "B" else buffer.cast("B")


def encode_command(*args: bytes) -> bytes:
    """Return a command as bytes."""
    return b"*%d\r\n" % len(args) + b"".join([b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args])


class ReplyReader:
    """Reads replies as they come, in any pieces.

    Call :meth:`expect` for each command sent, receive into :meth:`buffers`, and tell :meth:`advance` how much came.
    Memory is bounded by constants of this module, whatever the server sends. After an error it must not be used on.
    """

    def __init__(self) -> None:
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0
        self._end = 0
        self._expected: deque[Target | None] = deque()
        # Arrays that are not complete: how many elements are missing, and those that are there.
        self._stack: list[tuple[int, list[Reply]]] = []
        self._elements = 0
        self._bytes = 0
        # A value under way: where its missing bytes go, and its length; None if there is none.
        self._value_buffers: list[memoryview] = []
        self._value_missing = 0
        self._value_bytes: int | None = None
        # Length of a string without a target.
        self._string_bytes: int | None = None

    @property
    def outstanding(self) -> int:
        """Replies that are still to come."""
        return len(self._expected)

    def expect(self, targets: Iterable[Target | None] = (None,)) -> None:
        """Announce the next replies; a bulk string at the top level of one goes into its target."""
        self._expected.extend(targets)

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes are to be received, first the first; never empty."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._value_missing:
            return [*self._value_buffers, self._view[:AHEAD_BYTES]]
        limit = SCRATCH_BYTES
        if self._expected and self._expected[0] is not None and not self._stack:
            limit = min(limit, self._end + AHEAD_BYTES)
        if self._start and limit - self._end < AHEAD_BYTES:
            # Moves less than one reply, and only when the scratch memory is used up.
            self._scratch[: self._end - self._start] = self._scratch[self._start : self._end]
            self._end -= self._start
            self._start = 0
            limit = SCRATCH_BYTES
        return [self._view[self._end : limit]]

    def advance(self, count: int) -> list[Reply]:
        """Take ``count`` bytes that were received, and return the replies that are complete now, in order.

        Raises:
            ProtocolError: They are no reply to what was asked. Replies that were complete before are lost with it.
        """
        if self._value_missing:
            count -= self._fill(count)
        self._end += count
        replies: list[Reply] = []
        self._take_short(replies)
        while self._start < self._end and self._step(replies):
            pass
        return replies

    def release(self) -> None:
        """Let go of all targets."""
        self._expected.clear()
        self._value_buffers.clear()
        self._value_missing = 0

    def _fill(self, count: int) -> int:
        """Note bytes that came directly into the target; return how many of ``count`` they were."""
        filled = min(count, self._value_missing)
        self._value_missing -= filled
        if not self._value_missing:
            self._value_buffers = []
            return filled
        left = filled
        while left:
            first = self._value_buffers[0]
            if first.nbytes > left:
                self._value_buffers[0] = first[left:]
                break
            left -= first.nbytes
            self._value_buffers.pop(0)
        return filled

    def _take_short(self, replies: list[Reply]) -> None:
        """Take a run of ``:0``, ``:1`` and ``+OK`` at once: the answers to a thousand EXISTS, and to every SET."""
        if self._value_bytes is not None or self._string_bytes is not None or self._stack:
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
        """Take one thing out of the scratch memory; return whether there may be more."""
        if self._value_bytes is not None:
            return self._end_value(replies)
        if self._string_bytes is not None:
            return self._end_string(replies)
        at = self._scratch.find(_CRLF, self._start, self._end)
        if (at if at >= 0 else self._end) - self._start > LINE_BYTES_MAX:
            raise ProtocolError(f"a line is longer than {LINE_BYTES_MAX} bytes")
        if at < 0:
            return False
        kind, rest = bytes(self._view[self._start : self._start + 1]), bytes(self._view[self._start + 1 : at])
        self._start = at + 2
        if not self._expected:
            raise ProtocolError("a reply came that nobody had asked for")
        self._account(len(rest))
        if kind == b":":
            self._emit(_integer(rest), replies)
        elif kind == b"$":
            self._begin_string(rest, replies)
        elif kind == b"+":
            self._emit(rest.decode("utf-8", "replace"), replies)
        elif kind == b"-":
            code, _, message = rest.decode("utf-8", "replace").partition(" ")
            self._emit(ErrorReply(code, message), replies)
        elif kind == b"*":
            self._begin_array(rest, replies)
        else:
            raise ProtocolError(f"no type of reply begins with {kind!r}")
        return True

    def _begin_string(self, rest: bytes, replies: list[Reply]) -> None:
        if rest == b"-1":
            self._emit(None, replies)
            return
        length = _length(rest)
        target = None if self._stack else self._expected[0]
        if target is None:
            if length > BULK_BYTES_MAX:
                raise ProtocolError(f"a string of {length} bytes came where at most {BULK_BYTES_MAX} are expected")
            self._account(length)
            self._string_bytes = length
            return
        if length > target.capacity_bytes:
            raise ReplyTooLongError(length, target.capacity_bytes)
        self._value_bytes = self._value_missing = length
        self._value_buffers = target.buffers[:] if length == target.capacity_bytes else _cut(target.buffers, length)
        # What of the value came together with its length line: at most ``AHEAD_BYTES``, as no more is asked for where
        # a value comes next.
        have = left = min(self._end - self._start, length)
        for buffer in self._value_buffers:
            part = min(left, buffer.nbytes)
            buffer[:part] = self._view[self._start : self._start + part]
            self._start += part
            left -= part
            if not left:
                break
        self._fill(have)

    def _end_value(self, replies: list[Reply]) -> bool:
        if self._value_missing or not self._take_crlf(0):
            return False
        size, self._value_bytes = self._value_bytes, None
        self._emit(Filled(size or 0), replies)
        return True

    def _end_string(self, replies: list[Reply]) -> bool:
        length, start = self._string_bytes or 0, self._start
        if not self._take_crlf(length):
            return False
        self._string_bytes = None
        self._emit(bytes(self._view[start : start + length]), replies)
        return True

    def _take_crlf(self, length: int) -> bool:
        """Take ``length`` bytes and the line end behind them, if they are there."""
        end = self._start + length
        if self._end < end + 2:
            return False
        if self._scratch[end : end + 2] != _CRLF:
            raise ProtocolError("a string does not end where its length says")
        self._start = end + 2
        return True

    def _begin_array(self, rest: bytes, replies: list[Reply]) -> None:
        count = 0 if rest == b"-1" else _length(rest)
        self._elements += count
        if self._elements > ELEMENTS_MAX or len(self._stack) >= DEPTH_MAX:
            raise ProtocolError(f"a reply has more than {ELEMENTS_MAX} elements or {DEPTH_MAX} levels")
        if count:
            self._stack.append((count, []))
        else:
            self._emit(None if rest == b"-1" else [], replies)

    def _emit(self, value: Reply, replies: list[Reply]) -> None:
        """Take in a value that is complete, and the arrays that are complete with it."""
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


def _cut(buffers: Sequence[memoryview], length: int) -> list[memoryview]:
    """Return the first ``length`` bytes of the buffers."""
    found = []
    for buffer in buffers:
        if not length:
            break
        found.append(buffer[:length])
        length -= found[-1].nbytes
    return found


def _length(text: bytes) -> int:
    if not text.isdigit() or len(text) > _LENGTH_DIGITS_MAX:
        raise ProtocolError(f"{text[:20]!r} is no length")
    return int(text)


def _integer(text: bytes) -> int:
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if not digits.isdigit() or len(digits) > _INTEGER_DIGITS_MAX:
        raise ProtocolError(f"{text[:20]!r} is no integer")
    return int(text)
