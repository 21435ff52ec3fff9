"""Streams: a connected non-blocking socket, plain or with TLS, that receives into and sends from lists of buffers.

Sends and receives keep the GIL. Python's own calls release it; while a Python thread is busy, taking it back takes up
to a switch interval, longer than most of these calls. ctypes can keep it. The calls cannot block, because each has
``MSG_DONTWAIT``. Linux only, because of the layout of ``struct msghdr``;
https://man7.org/linux/man-pages/man2/sendmsg.2.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvstore.codec.rows import address_of
from kvstore.config import TierConfig
from kvstore.errors import ConfigError
from kvstore.files import FollowedFiles

BUFFERS_MAX: Final = 64
"""Buffers of one call; far below the kernel's limit of 1,024."""

_PROBE_S: Final = 30
"""Idle time after which a connection is probed, before firewalls and address translation forget it, and time without an
acknowledgement after which it is closed. Then a forgotten connection does not wait for the next batch to be noticed."""

HELD_BYTES_MAX: Final = 4 << 20
"""Most bytes of one call: the kernel copies them in half a millisecond, and a socket rarely accepts more."""


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Message(ctypes.Structure):
    """``struct msghdr``."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


def _call(library: ctypes.PyDLL, name: str) -> Any:
    function = library[name]
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    function.restype = ctypes.c_ssize_t
    return function


# PyDLL keeps the GIL during each call, which is the purpose of this module.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_send: Final = _call(_libc, "sendmsg")
_receive: Final = _call(_libc, "recvmsg")

# By item, not by attribute: an attribute is shared, and other libraries may change its types.
_bytes_address: Final = ctypes.pythonapi["PyBytes_AsString"]
_bytes_address.argtypes = [ctypes.py_object]
_bytes_address.restype = ctypes.c_void_p

# No signal when the other side is gone, because the embedding program may not ignore SIGPIPE.
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)


class HeldCalls:
    """System calls that hold the GIL, for one socket; used by one thread at a time.

    No buffer is kept: addresses are valid only until a call returns. A call that cannot move a byte now raises
    ``BlockingIOError``; if the connection broke, it raises another ``OSError``.
    """

    def __init__(self) -> None:
        self._pieces = (_Piece * BUFFERS_MAX)()
        self._message = _Message(pieces=ctypes.addressof(self._pieces))
        self._at = ctypes.addressof(self._message)

    def send(self, descriptor: int, buffers: Sequence[bytes | memoryview]) -> int:
        """Send from buffers, in order; return the number of bytes sent."""
        self._point_at(buffers)
        return self._checked(_send(descriptor, self._at, _SEND_FLAGS))

    def receive(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Receive into buffers, in order; return the number of bytes received, 0 at the end of the stream."""
        self._point_at(buffers)
        return self._checked(_receive(descriptor, self._at, socket.MSG_DONTWAIT))

    def _point_at(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Describe the first buffers, up to the limit of bytes per call."""
        room, count = HELD_BYTES_MAX, 0
        for piece, buffer in zip(self._pieces, buffers, strict=False):
            if isinstance(buffer, bytes):
                piece.base, length = _bytes_address(buffer), len(buffer)
            else:
                length = buffer.nbytes
                piece.base = address_of(buffer) if length else None
            piece.length = min(length, room)
            room -= piece.length
            count += 1
            if not room:
                break
        self._message.piece_count = count

    def _checked(self, moved: int) -> int:
        if moved < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return moved


TLS: TypeAlias = "FollowedFiles[ssl.SSLContext]"
"""TLS settings of one side, made again after one of their files has changed."""

_LINGER_OFF: Final = struct.pack("ii", 1, 0)
_DECRYPTED_MAX: Final = 1 << 17
"""Bytes decrypted in one call: eight records, some fifty microseconds."""

_BACKLOG: Final = 128
"""Backlog of connections to accept; a fleet's engines may all connect at the same time."""

_SHORT_BYTES: Final = 65536
"""Room for an answer without a value. A receive of this size takes some microseconds and keeps the GIL."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a server: host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_local(self) -> bool:
        """Whether both ends are on this machine."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


class Stream:
    """A connected socket. Nothing is buffered here: bytes go between the socket and the buffers of the caller.

    With TLS one copy is unavoidable: bytes are decrypted from OpenSSL's record into the buffer, and encrypted from the
    buffer into a record.

    Sends and short receives keep the GIL if possible: while a Python thread is busy, taking it back takes longer than
    the call. A long receive releases it, because other threads need it to verify blocks.

    ``sock``: connected, non-blocking; with TLS an ``ssl.SSLSocket`` after its handshake.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        # A TLS stream may have decrypted bytes while its descriptor is not readable.
        self.is_encrypted = self._tls is not None
        self._held = HeldCalls() if self._tls is None and sys.platform == "linux" else None

    @property
    def remote_address(self) -> tuple[str, int]:
        """Numeric host and port of the other end of an IP connection."""
        host, port = self._sock.getpeername()[:2]
        return host, port

    @property
    def binding(self) -> bytes:
        """Bytes that only both ends of this TLS connection share (of TLS 1.3, the client's Finished); else empty."""
        return (self._tls.get_channel_binding("tls-unique") or b"") if self._tls is not None else b""

    def fileno(self) -> int:
        """Return the descriptor to watch."""
        return self._sock.fileno()

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Receive into buffers, in order; return the number of bytes, 0 at the end of the stream.

        With TLS, ``ssl.SSLWantWriteError`` means that it must write before it can read more.
        """
        if self._held is not None and sum([buffer.nbytes for buffer in buffers]) <= _SHORT_BYTES:
            return self._held.receive(self._sock.fileno(), buffers)
        if self._tls is None:
            return self._sock.recvmsg_into(buffers[:BUFFERS_MAX])[0]
        # OpenSSL returns one record (16 KiB) per call. Read several, so that the caller's work is not per record.
        room = buffers[0][:_DECRYPTED_MAX]
        received = 0
        while received < room.nbytes:
            try:
                count = self._tls.recv_into(room[received:])
            except OSError as error:
                # The bytes received so far count; the next call reports the end or the failure again.
                if received:
                    break
                if isinstance(error, ssl.SSLWantReadError):
                    raise BlockingIOError from None
                raise
            if not count:
                break
            received += count
        return received

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send from buffers, in order; return the number of bytes sent."""
        if self._held is not None:
            return self._held.send(self._sock.fileno(), buffers)
        if self._tls is None:
            return self._sock.sendmsg(buffers[:BUFFERS_MAX])
        try:
            return self._tls.send(buffers[0])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def close(self, *, abort: bool) -> None:
        """Close it; ``abort`` resets the connection, so that the server drops a partial request immediately."""
        if abort and self._sock.family != socket.AF_UNIX:
            # A socket that is broken already has nothing to reset.
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_OFF)
        self._sock.close()


def check_tls_files(config: TierConfig, *, is_encrypted: bool, remedy: str) -> None:
    """Refuse a configuration whose TLS files would be ignored; ``remedy`` enables TLS."""
    given = [name for name in ("tls_ca", "tls_cert", "tls_key") if getattr(config, name, None)]
    if given and not is_encrypted:
        names = " and ".join(map(repr, given))
        raise ConfigError(f"{names} would be ignored: connections have no TLS. {remedy}, or leave out {names}.")
    if "tls_key" in given and "tls_cert" not in given:
        raise ConfigError("'tls_key' would be ignored without 'tls_cert'. Give 'tls_cert' too, or leave out 'tls_key'.")


def client_tls(
    *,
    ca: Path | None = None,
    with_system_ca: bool = False,
    cert: Path | None = None,
    key: Path | None = None,
    check_hostname: bool = True,
) -> TLS:
    """Return TLS settings of a client: at least TLS 1.2, certificates verified.

    Args:
        ca: PEM file of the authorities to trust; without it, those of the system.
        with_system_ca: Whether to trust those of the system too.
        check_hostname: Whether the server's certificate must be for the requested host.
    """

    def make() -> ssl.SSLContext:
        context = _context(ssl.Purpose.SERVER_AUTH, ca, cert, key)
        context.check_hostname = check_hostname
        if ca and with_system_ca:
            context.load_default_certs()
        return context

    return _followed(make, ca, cert, key)


def server_tls(*, cert: Path, key: Path, client_ca: Path | None = None) -> TLS:
    """Return TLS settings of a server: at least TLS 1.2.

    ``client_ca``: PEM file of authorities; clients then need a certificate from one of them.
    """

    def make() -> ssl.SSLContext:
        context = _context(ssl.Purpose.CLIENT_AUTH, client_ca, cert, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return _followed(make, client_ca, cert, key)


def check_tls(tls: TLS | None) -> None:
    """Read the files of TLS settings. ``ConfigError``: they can't be used."""
    if tls is not None:
        tls.look()
        _ = tls.value


@contextlib.asynccontextmanager
async def current_tls(tls: TLS | None, endpoint: Endpoint) -> AsyncIterator[ssl.SSLContext | None]:
    """Yield the settings for a connection to an endpoint; after a failure of TLS, the files are read again.

    With TLS 1.3, a server refuses a client's certificate after the handshake, so the context includes the first answer.
    """
    if tls is None:
        yield None
        return
    context = await tls.current()
    try:
        yield context
    except Exception as error:
        failure = next((one for one in (error, error.__cause__) if isinstance(one, ssl.SSLError)), None)
        if failure is not None:
            reason = getattr(failure, "verify_message", "") or failure.reason or "refused"
            await tls.refused(context, f"TLS with {endpoint} fails: {reason}")
        raise


def listening_socket(endpoint: Endpoint) -> socket.socket:
    """Return a non-blocking socket that listens on an endpoint with an address.

    Raises:
        OSError: The address is not available.
    """
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted engine can bind the port while connections of its predecessor still linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind((endpoint.host, endpoint.port))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def accepted_stream(sock: socket.socket, context: ssl.SSLContext | None) -> Stream:
    """Return the stream of an accepted connection, after the TLS handshake if there is a context.

    The caller must limit the time of this call. The socket is closed if it fails.

    Raises:
        OSError: TLS failed, or the connection broke.
    """
    try:
        _prepare(sock)
        if context is not None:
            sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            await _shake_hands(sock)
    except BaseException:
        sock.close()
        raise
    return Stream(sock)


async def open_stream(endpoint: Endpoint, context: ssl.SSLContext | None) -> Stream:
    """Connect, with a TLS handshake if there is a context. The caller must limit the time of this call.

    Raises:
        OSError: No connection, or TLS failed (``ssl.SSLError`` is a subclass).
    """
    sock = await _connect(endpoint)
    try:
        if context is not None:
            name = endpoint.host if context.check_hostname or not endpoint.path else None
            sock = context.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=name)
            await _shake_hands(sock)
    except BaseException:
        sock.close()
        raise
    return Stream(sock)


async def _connect(endpoint: Endpoint) -> socket.socket:
    if endpoint.path:
        return await _connect_to(socket.AF_UNIX, endpoint.path)
    failure: OSError | None = None
    for family, address in await _addresses(endpoint):
        try:
            return await _connect_to(family, address)
        except OSError as error:
            failure = error
    raise failure or OSError(f"no address for {endpoint}")


async def _addresses(endpoint: Endpoint) -> list[tuple[int, object]]:
    try:
        version = ipaddress.ip_address(endpoint.host).version
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]
    # Avoids the resolver's thread, which takes longer than connecting to a nearby host.
    return [(socket.AF_INET if version == 4 else socket.AF_INET6, (endpoint.host, endpoint.port))]


async def _connect_to(family: int, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _prepare(sock)
        await asyncio.get_running_loop().sock_connect(sock, address)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S // 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PROBE_S * 1000)


def _followed(make: Callable[[], ssl.SSLContext], *given: Path | None) -> TLS:
    paths = [path for path in given if path]

    def made(_: object) -> ssl.SSLContext:
        try:
            return make()
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(map(str, paths))
            text = f"TLS files {named} can't be used: {error}. Give readable PEM files that match."
            raise ConfigError(text) from error

    return FollowedFiles(paths, made, "TLS file", show=repr)


def _context(purpose: ssl.Purpose, ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose, cafile=str(ca) if ca else None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert:
        context.load_cert_chain(str(cert), str(key) if key else None)
    return context


async def _shake_hands(sock: ssl.SSLSocket) -> None:
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            await _ready(sock.fileno(), writing=False)
        except ssl.SSLWantWriteError:
            await _ready(sock.fileno(), writing=True)


async def _ready(descriptor: int, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(descriptor, wake)
    try:
        await ready
    finally:
        remove(descriptor)
