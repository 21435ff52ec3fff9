"""A server that speaks S3 from memory, in a process of its own, with injected faults.

Without faults it is the null server of the benchmarks: it answers at once, checks no signature, and can discard
stored data. :class:`FaultServer` starts it, controls it and reads its counters; the program is this module.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import http.client
import json
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from tests.s3.memory_store import Answer, MemoryStore, failure

BUCKET = "kvstore-faults"
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30.0

_INBOX_BYTES = 256 * 1024


class Fault(enum.StrEnum):
    """Kinds of faults. If an answer has no body, a fault of the body affects its head or has no effect."""

    REFUSED = "refused"  # The server stops listening and closes its connections; ``every`` does not apply.
    RESET_BEFORE = "reset_before"  # The connection is reset once the request has been read.
    RESET_AFTER = "reset_after"  # The connection is reset after the head of the answer.
    CUT = "cut"  # The connection is closed after ``after_bytes`` of the body.
    TRICKLE = "trickle"  # After the head, the body is sent at one byte a second.
    BLACK_HOLE = "black_hole"  # No answer; the connection stays open.
    DECLARES_MORE = "declares_more"  # Content-Length is 16 more than the body; the connection stays open.
    DECLARES_LESS = "declares_less"  # Content-Length is 16 less than the body: the rest precedes the next answer.
    SHORT_OBJECT = "short_object"  # The last 16 bytes of the object are missing, in an otherwise valid answer.
    LONG_OBJECT = "long_object"  # 16 surplus bytes, in an otherwise valid answer.
    FLIPPED = "flipped"  # One bit of the body is wrong.
    DUPLICATED = "duplicated"  # The body is sent twice, and its length declared once.
    INTERNAL = "internal"  # 500.
    SLOW_DOWN = "slow_down"  # 503 SlowDown.
    FORBIDDEN = "forbidden"  # 403.
    NOT_FOUND = "not_found"  # 404.
    PRECONDITION = "precondition"  # 412.
    NOT_MODIFIED = "not_modified"  # 304 without a body, as of old services for an object that exists.
    KEY_DISABLED = "key_disabled"  # 400, as for an object whose encryption key is disabled.
    BAD_RANGE = "bad_range"  # 416.
    OTHER_RANGE = "other_range"  # 206, with a range that starts one byte later.
    XML_ERROR = "xml_error"  # 200, with an error as its body.
    REDIRECT = "redirect"  # 307 to another host, which counts its connections.
    GARBAGE = "garbage"  # The answer is not HTTP.
    HTML_PAGE = "html_page"  # 200, with a proxy's HTML page.
    ENDLESS = "endless"  # 500, with an endless body.
    LATE = "late"  # A right answer after ``delay_s``.
    UNCONDITIONAL = "unconditional"  # 501 for a condition; other requests are answered.
    RESTARTS = "restarts"  # A list begins at its first name, whatever the query says.


_STATUS = {
    Fault.INTERNAL: (500, "InternalError"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.FORBIDDEN: (403, "AccessDenied"),
    Fault.NOT_FOUND: (404, "NoSuchKey"),
    Fault.PRECONDITION: (412, "PreconditionFailed"),
    Fault.UNCONDITIONAL: (501, "NotImplemented"),
    Fault.KEY_DISABLED: (400, "KMS.DisabledException"),
    Fault.BAD_RANGE: (416, "InvalidRange"),
    Fault.XML_ERROR: (200, "InternalError"),
}


class FaultServer:
    """The server's process, as seen by a test. Its methods block briefly, and may be called from any thread."""

    bucket = BUCKET
    access_key = "AKIAFAULTSERVER00000"
    secret_key = "fault-server-secret-canary"
    region = "us-east-1"
    tls_ca: Path | None = None

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        """Start the server and wait until it listens."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.s3.fault_server", "--bucket", self.bucket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self.stop()
            raise RuntimeError("the fault server did not start")
        ports = json.loads(line)
        self.url, self._control = f"http://127.0.0.1:{ports['port']}", ports["control"]
        self.trap = ports["trap"]

    def stop(self) -> None:
        """Stop the server. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def plan(
        self,
        fault: str | None,
        *,
        every: int = 1,  # Fail every Nth request.
        methods: Sequence[str] = (),  # Only these methods, such as ``("GET",)``.
        count: int | None = None,  # Most faults.
        after_bytes: int = 100,  # See ``CUT``.
        delay_s: float = 0.1,  # See ``LATE``.
        contains: str = "",  # Only requests with this in their path or query.
    ) -> None:
        """Inject a fault, or none, into requests from now on."""
        name = None if fault is None else str(Fault(fault))
        chosen = {"fault": name, "every": every, "methods": list(methods), "count": count, "contains": contains}
        self._ask("plan", {**chosen, "after_bytes": after_bytes, "delay_s": delay_s})

    def keep_puts(self, keep: bool) -> None:
        """Set whether stored data is kept, or read and discarded."""
        self._ask("keep", {"keep": keep})

    def clear(self) -> None:
        """Remove all objects and reset the counters."""
        self._ask("clear", {})

    def age(self, prefix: str, age_s: float) -> None:
        """Make the objects under a prefix older by ``age_s``."""
        self._ask("age", {"prefix": prefix, "age_s": age_s})

    def counts(self) -> dict[str, int]:
        """Return the counters since :meth:`clear`, such as ``attempts``, ``GET``, ``fault_late`` and ``trapped``."""
        return self._ask("counts", {})

    @property
    def attempts(self) -> int:
        """Requests received completely since the last :meth:`clear`."""
        return self.counts().get("attempts", 0)

    def _ask(self, what: str, arguments: dict[str, Any]) -> dict[str, int]:
        connection = http.client.HTTPConnection("127.0.0.1", self._control, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", f"/{what}", json.dumps(arguments))
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"the fault server refused {what}: {text.decode()}")
            found: dict[str, int] = json.loads(text)
            return found


@contextlib.contextmanager
def fault_server() -> Iterator[FaultServer]:
    """Run a fault server in a process of its own."""
    server = FaultServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@dataclass(slots=True)
class Plan:
    """A fault and its frequency."""

    fault: Fault | None = None
    every: int = 1
    methods: frozenset[str] = frozenset()
    count: int | None = None
    after_bytes: int = 100
    delay_s: float = 0.1
    contains: str = ""
    seen: int = 0

    def next(self, method: str, target: str) -> Fault | None:
        """Return the fault for a received request."""
        if self.fault is None or (self.methods and method not in self.methods) or self.contains not in target:
            return None
        self.seen += 1
        if self.seen % self.every or (self.count is not None and self.seen // self.every > self.count):
            return None
        return self.fault


class _World:
    """State shared by all connections."""

    def __init__(self, bucket: str) -> None:
        self.store = MemoryStore(bucket)
        self.plan = Plan()
        self.counts: Counter[str] = Counter()
        self.connections: set[_Connection] = set()
        self.trap_url = ""
        self.scratch: dict[int, bytearray] = {}


class _Connection(asyncio.BufferedProtocol):
    """One connection: reads request bodies directly into their final buffers, and answers in order."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._inbox = bytearray(_INBOX_BYTES)
        self._filled = 0
        self._body = bytearray()
        self._missing = 0
        self._chunked: bytearray | None = None
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of uvloop are not subclasses of asyncio's.
        self.transport: Any = transport
        self._world.counts["connections"] += 1
        self._world.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._world.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._missing:
            size = len(self._body)
            return memoryview(self._body)[size - self._missing :]
        return memoryview(self._inbox)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._missing:
            self._missing -= nbytes
            if not self._missing:
                self._complete()
            return
        self._filled += nbytes
        self._read_on()

    def _read_on(self) -> None:
        while self._filled and not self._busy and not self._missing:
            if self._chunked is not None:
                self._chunked += memoryview(self._inbox)[: self._filled]
                self._filled = 0
                self._end_chunked()
                continue
            end = self._inbox.find(b"\r\n\r\n", 0, self._filled)
            if end < 0:
                if self._filled == _INBOX_BYTES:
                    self.transport.abort()
                return
            self._begin(bytes(self._inbox[:end]).decode("latin-1"))
            self._drop(end + 4)
            self._begin_body()

    def _drop(self, count: int) -> None:
        rest = self._filled - count
        if rest:
            self._inbox[:rest] = self._inbox[count : self._filled]
        self._filled = rest

    def _begin(self, text: str) -> None:
        first, *lines = text.split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self._head = (method, target, headers)

    def _begin_body(self) -> None:
        assert self._head is not None
        method, _, headers = self._head
        if headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in headers.get("transfer-encoding", ""):
            self._chunked = bytearray()
            return
        length = int(headers.get("content-length", 0))
        if method == "PUT" and not self._world.store.keep_puts:
            # Discarded bodies of all connections may overwrite each other: no memory has to be initialised.
            self._body = self._world.scratch.setdefault(length, bytearray()) or bytearray(length)
            self._world.scratch[length] = self._body
        else:
            self._body = bytearray(length)
        here = min(length, self._filled)
        self._body[:here] = memoryview(self._inbox)[:here]
        self._drop(here)
        self._missing = length - here
        if not self._missing:
            self._complete()

    def _end_chunked(self) -> None:
        assert self._chunked is not None
        decoded, end = _decode_chunks(self._chunked)
        if end is None:
            return
        rest = self._chunked[end:]
        self._chunked = None
        self._inbox[: len(rest)] = rest
        self._filled = len(rest)
        self._body = decoded
        self._complete()

    def _complete(self) -> None:
        assert self._head is not None
        method, target, headers = self._head
        world = self._world
        world.counts["attempts"] += 1
        world.counts[method] += 1
        body, self._body = self._body, bytearray()
        if "aws-chunked" in headers.get("content-encoding", ""):
            body = _decode_chunks(body)[0]
        fault = world.plan.next(method, target)
        if fault is Fault.RESTARTS:
            target = "&".join(each for each in target.split("&") if not each.startswith("start-after="))
            fault = None
        if fault is Fault.UNCONDITIONAL and "if-none-match" not in headers:
            fault = None
        if fault is None:
            self._send(world.store.answer(method, target, headers, body), method)
            self._read_on()
            return
        world.counts[f"fault_{fault}"] += 1
        if fault in _STATUS:
            status, code = _STATUS[fault]
            self._send(failure(status, code), method)
        elif fault is Fault.NOT_MODIFIED:
            self._send(Answer(304, b"", {}), method)
        elif fault is Fault.REDIRECT:
            self._send(failure(307, "TemporaryRedirect", Location=world.trap_url + target), method)
        elif fault is Fault.RESET_BEFORE:
            _reset(self.transport)
        elif fault is Fault.GARBAGE:
            self.transport.write(b"\x16\x03\x01 this is no HTTP \r\n\r\n" * 10)
        elif fault is Fault.HTML_PAGE:
            self._send(Answer(200, b"<html>maintenance</html>" + b" " * 300, {"Content-Type": "text/html"}), method)
        elif fault is Fault.OTHER_RANGE:
            first, _, last = headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
            shifted = {**headers, "range": f"bytes={int(first) + 1}-{last}"}
            self._send(world.store.answer(method, target, shifted, body), method)
        elif fault is Fault.ENDLESS:
            self._busy = True
            self.transport.write(b"HTTP/1.1 500 Other\r\nTransfer-Encoding: chunked\r\n\r\n")
            self._go_on_for_ever()
            return
        elif fault is Fault.LATE:
            self._busy = True
            answer = world.store.answer(method, target, headers, body)
            self._later(world.plan.delay_s, lambda: self._send_late(answer, method))
            return
        elif fault is Fault.BLACK_HOLE:
            self._busy = True
            return
        else:
            self._distort(fault, world.store.answer(method, target, headers, body), method)
        self._read_on()

    def _send(self, answer: Answer, method: str) -> None:
        body = b"" if method == "HEAD" else answer.body
        self.transport.writelines([_head_of(answer, method), body] if len(body) else [_head_of(answer, method)])

    def _send_late(self, answer: Answer, method: str) -> None:
        self._busy = False
        self._send(answer, method)
        self._read_on()

    def _distort(self, fault: Fault, answer: Answer, method: str) -> None:
        """Send an answer with wrong bytes, a wrong length or a wrong end."""
        transport, body = self.transport, memoryview(bytes(answer.body))
        head = _head_of(answer, method)
        if not len(body):
            # This breaks the head itself.
            cut = len(head) // 2
            head, body = head[:cut], memoryview(head[cut:])
        if fault is Fault.RESET_AFTER:
            transport.write(head)
            _reset(transport)
        elif fault is Fault.CUT:
            transport.writelines([head, bytes(body[: min(self._world.plan.after_bytes, len(body) - 1)])])
            transport.close()
        elif fault is Fault.TRICKLE:
            transport.write(head)
            self._busy = True
            self._trickle(bytes(body), 0)
        elif fault is Fault.DUPLICATED:
            transport.writelines([head, bytes(body), bytes(body)])
        elif not len(answer.body):
            self._send(answer, method)
        elif fault is Fault.FLIPPED:
            wrong = bytearray(body)
            wrong[(len(wrong) * 2) // 3] ^= 0x10
            transport.writelines([head, bytes(wrong)])
        elif fault in (Fault.DECLARES_MORE, Fault.DECLARES_LESS):
            answer.length = len(body) + (16 if fault is Fault.DECLARES_MORE else -16)
            transport.writelines([_head_of(answer, method), bytes(body)])
        else:
            answer.body = bytes(body[:-16]) if fault is Fault.SHORT_OBJECT else bytes(body) + bytes(16)
            self._send(answer, method)

    def _trickle(self, body: bytes, position: int) -> None:
        if position < len(body) and not self.transport.is_closing():
            self.transport.write(body[position : position + 1])
            self._later(1.0, lambda: self._trickle(body, position + 1))

    def _go_on_for_ever(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size() < _INBOX_BYTES:
            self.transport.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            self._world.counts["endless_bytes"] += 65536
        self._later(0.0 if self.transport.get_write_buffer_size() < _INBOX_BYTES else 0.01, self._go_on_for_ever)

    def _later(self, delay_s: float, work: Any) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, work)


_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content"}


def _head_of(answer: Answer, method: str) -> bytes:
    length = answer.length if answer.length >= 0 else len(answer.body)
    lines = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Other')}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if answer.status != 204:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _decode_chunks(data: bytearray) -> tuple[bytearray, int | None]:
    """Decode chunks (of HTTP or aws-chunked); return the bytes, and the end of the last chunk's trailers."""
    decoded, at = bytearray(), 0
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return decoded, None
        size = int(bytes(data[at:end]).partition(b";")[0], 16)
        at = end + 2
        if size == 0:
            # Trailers follow, and an empty line.
            last = end if data[at : at + 2] == b"\r\n" else data.find(b"\r\n\r\n", at)
            return decoded, None if last < 0 else last + 4
        if len(data) < at + size + 2:
            return decoded, None
        decoded += data[at : at + size]
        at += size + 2


def _reset(transport: Any) -> None:
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def _serve(bucket: str) -> None:
    world = _World(bucket)
    loop = asyncio.get_running_loop()
    listener: list[asyncio.AbstractServer] = []
    port = 0

    async def listen() -> int:
        server = await loop.create_server(lambda: _Connection(world), "127.0.0.1", port, backlog=1024)
        listener.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def trapped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        world.counts["trapped"] += 1
        writer.close()

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        what = head.split(" ", 2)[1].strip("/")
        length = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
        arguments = json.loads(await reader.readexactly(length))
        if what == "plan":
            name = arguments.pop("fault")
            arguments["methods"] = frozenset(arguments["methods"])
            world.plan = Plan(None if name is None else Fault(name), **arguments)
            if world.plan.fault is Fault.REFUSED:
                while listener:
                    listener.pop().close()
                for connection in list(world.connections):
                    connection.transport.abort()
            elif not listener:
                await listen()
        elif what == "keep":
            world.store.keep_puts = arguments["keep"]
        elif what == "age":
            world.store.age(arguments["prefix"], arguments["age_s"])
        elif what == "clear":
            world.store = MemoryStore(bucket)
            world.counts.clear()
        found = {**world.counts, "open_connections": len(world.connections)}
        found["objects"] = len(world.store.objects)
        body = json.dumps(found).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    port = await listen()
    # Another address of this machine, and so another host than the requested one.
    trap = await asyncio.start_server(trapped, "127.0.0.2", 0)
    world.trap_url = f"http://127.0.0.2:{trap.sockets[0].getsockname()[1]}"
    controls = await asyncio.start_server(control, "127.0.0.1", 0)
    ports = {"port": port, "control": controls.sockets[0].getsockname()[1], "trap": world.trap_url}
    print(json.dumps(ports), flush=True)
    # The parent holds the other end of the pipe; the end of the input means that the parent has ended.
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Serve until standard input ends; the first line of output has the ports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket", default=BUCKET)
    uvloop.run(_serve(parser.parse_args().bucket))


if __name__ == "__main__":
    main()
