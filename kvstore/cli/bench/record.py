"""``kvstore-bench record``: records the requests of running engines as a trace."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated

import msgspec

from kvstore.cli.bench.traces import TraceRequest
from kvstore.cli.command_line import Argument, Exit, ExitCode, Option, check_output, duration_option
from kvstore.cli.interruption import Stopping
from kvstore.cli.terminal import say
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiering.recording import DATAGRAM_BYTES_MAX, SOCKET_PATH_BYTES_MAX, RecordedRequest

_SocketPath = Annotated[
    Path, Argument(metavar="SOCKET", help="Path of the socket to create: the engines' trace_socket.")
]
_Out = Annotated[Path, Option("--out", "-o", metavar="FILE", help="The trace; replaced if it exists.")]
_Duration = Annotated[
    str | None, Option("--duration", "-d", metavar="TIME", help="Time to record, such as 1h. Default: until Ctrl-C.")
]
_Requests = Annotated[int | None, Option("--requests", metavar="N", help="Number of requests to record.", min=1)]

_LOOK_S = 0.1
"""Interval of checks whether to stop, while no request arrives."""

_FEEDS_MAX = 4096
"""Maximum engines tracked for lost requests; more than one machine runs, including restarts."""


def record(
    path: _SocketPath, out: _Out = Path("trace.jsonl"), duration: _Duration = None, requests: _Requests = None
) -> None:
    """Record the requests of running engines, for 'replay'.

    The trace has salted hashes of blocks, and times. Engines need {"tiering": {"trace_socket": SOCKET}}. They send
    requests only while this command runs.
    """
    check_output(out, "--out")
    ends_at = time.monotonic() + float(duration_option(duration, "--duration")) if duration else float("inf")
    encoder = msgspec.json.Encoder()
    count = 0
    try:
        with Stopping() as stopping, Recorder(path) as recorder, out.open("wb", buffering=0) as file:
            say(f"Recording to {str(out)!r}. Ctrl-C ends it.")

            def is_over() -> bool:
                return stopping() or time.monotonic() >= ends_at or count == requests

            for request in recorder.requests(is_over):
                file.write(encoder.encode(request) + b"\n")
                count += 1
    except OSError as error:
        raise KVStoreError(
            f"--out {str(out)!r} can't be written: {error.strerror}. The file has {count} requests."
        ) from error
    if recorder.lost or recorder.refused:
        say(f"{recorder.lost} requests arrived too fast and were lost; {recorder.refused} invalid ones were ignored.")
    if not count:
        say("No request came. Give the engines' trace_socket, and send requests of at least one full block.")
        raise Exit(ExitCode.FAILED)
    say(f"{count} requests. Replay them: kvstore-bench replay {out} --block-tokens {recorder.block_tokens}")


class Recorder:
    """Context that receives requests on a socket accessible only to its owner.

    Keys are replaced by hashes with a random salt, which is never written. Equal blocks of one recording have equal
    numbers, but no number can be traced to a prompt.

    Attributes:
        lost: Requests sent by engines but not received.
        refused: Invalid datagrams, and those with another block length than the first valid request.
        block_tokens: Tokens of a block; 0 until the first request.

    Raises:
        ConfigError: The socket cannot be created, or another recorder is running there.
    """

    def __init__(self, path: Path) -> None:
        self.lost = self.refused = self.block_tokens = 0
        self._path = path
        self._salt = secrets.token_bytes(32)
        self._next: dict[int, int] = {}
        self._started_s: float | None = None
        self._decoder = msgspec.msgpack.Decoder(RecordedRequest)

    def __enter__(self) -> Recorder:
        if len(os.fsencode(self._path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"The path {str(self._path)!r} has over {SOCKET_PATH_BYTES_MAX} bytes. Give a shorter one."
            )
        self._remove_stale()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_LOOK_S)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(self._path))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"The socket {str(self._path)!r} can't be made: {error.strerror}. Give the engine's trace_socket, in a "
                "directory that exists."
            ) from error
        finally:
            os.umask(before)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def requests(self, stopped: Callable[[], bool]) -> Iterator[TraceRequest]:
        """Yield requests until ``stopped()``."""
        while not stopped():
            try:
                data = self._socket.recv(DATAGRAM_BYTES_MAX)
            except TimeoutError:
                continue
            request = self._request_of(data)
            if request is not None:
                yield request

    def _request_of(self, data: bytes) -> TraceRequest | None:
        try:
            found = self._decoder.decode(data)
        except msgspec.DecodeError:
            self.refused += 1
            return None
        self.lost += max(0, found.number - self._next.get(found.feed, found.number))
        if len(self._next) >= _FEEDS_MAX:
            self._next.clear()
        self._next[found.feed] = found.number + 1
        block_tokens = found.block_tokens
        if (
            block_tokens <= 0
            or block_tokens != (self.block_tokens or block_tokens)
            or not 0 < len(found.blocks) <= -(-found.tokens // block_tokens)
            or min(found.blocks) < 0
        ):
            self.refused += 1
            return None
        self.block_tokens = block_tokens
        if self._started_s is None:
            self._started_s = found.at_s
        return TraceRequest(
            timestamp=round(max(0.0, found.at_s - self._started_s) * 1000, 3),
            input_length=found.tokens,
            hash_ids=tuple(dict.fromkeys(map(self._salted, found.blocks))),
        )

    def _salted(self, block: int) -> int:
        digest = hashlib.blake2b(block.to_bytes(8, "big"), key=self._salt, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def _remove_stale(self) -> None:
        """Remove the socket of a recorder that has ended without removing it."""
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                return
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(str(self._path))
                except ConnectionRefusedError:
                    self._path.unlink()
                else:
                    raise ConfigError(f"A recorder is running at {str(self._path)!r}. End it first.")
