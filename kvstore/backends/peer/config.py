"""Configuration of the peer backend."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import ClassVar, Final

from kvstore.backends.stream import Endpoint
from kvstore.config import Seconds, SecretStr, TierConfig, check_field
from kvstore.errors import ConfigError

__all__ = ["PeerConfig", "endpoint_of"]

_SECRET_MIN: Final = 16
"""Characters of a secret: a stranger who connects can try guesses at home, without asking again."""

_PEERS_MAX: Final = 64
"""Peers of a list: each is asked with each lookup."""


class PeerConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Blocks in the memory of other engines, and what this engine serves of its own.

    Attributes:
        listen: Address ``"host:port"`` where this engine serves blocks of its primary tier; empty: it serves none.
            Under vLLM the index of the data-parallel replica is added to the port.
        peers: Addresses of the engines that are asked with each lookup; our own is passed over.
        request_peers: Networks (``"10.0.0.0/8"``) and host names of which a request may name a peer.
        secret: What all engines of a fleet share; both sides of a connection prove that they have it.
        tls: Whether connections are encrypted.
        tls_ca: PEM file of the authorities to trust, of servers and, where we listen, of clients.
        tls_cert: PEM file of our certificate.
        tls_key: PEM file of its key.
        tls_check_hostname: Whether a server's certificate has to be for the host we asked for.
        connections: Connections to each peer that load.
        connect_timeout: Time to connect and greet.
        timeout: Time for one answer, to which its bytes at ``bytes_per_second_min`` are added; then the connection is
            closed. For the side that serves it is the time to take one block, and so how long a row is lent at most.
        serve_connections: Connections that are served at once.
        serve_share: Part of the primary tier's slots that may be lent at once.

    Raises:
        ConfigError: A value is out of range, or values don't go together.
    """

    aliases: ClassVar[dict[str, str]] = {"tls_ca_cert": "tls_ca"}

    listen: str = ""
    peers: tuple[str, ...] = ()
    # A request must not make an engine connect to wherever its sender likes.
    request_peers: tuple[str, ...] = ()
    secret: SecretStr | None = None
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_check_hostname: bool = True
    # The next batch is on its way while one is verified; one connection fills a link, four also an idle core.
    connections: int = 4
    # A neighbour in the same data centre answers in a millisecond.
    connect_timeout: Seconds = Seconds(1)
    timeout: Seconds = Seconds(1)
    # Every engine of a fleet may ask with a few connections each.
    serve_connections: int = 256
    # Each connection lends one row at a time; most of the tier stays free to be evicted.
    serve_share: float = 0.25
    # A stopped peer must cost less than recomputing a short prompt; lookups take a round trip.
    lookup_timeout: Seconds = Seconds("500ms")
    load_timeout: Seconds = Seconds(2)
    # Memory of another engine turns over in seconds, not in hours as a disk does.
    positive_ttl: Seconds = Seconds(5)

    def __post_init__(self) -> None:
        """Turn text into values and check ranges."""
        super().__post_init__()
        for name in ("listen", "peers"):
            for address in (self.listen,) if name == "listen" else self.peers:
                if address or name == "peers":
                    check_field(_endpoint(address) is not None, name, address, "'host:port'")
        check_field(len(self.peers) <= _PEERS_MAX, "peers", f"{len(self.peers)} addresses", f"at most {_PEERS_MAX}")
        check_field(1 <= self.connections <= 64, "connections", self.connections, "1 to 64")
        check_field(1 <= self.serve_connections <= 65536, "serve_connections", self.serve_connections, "1 to 65536")
        check_field(0 < self.serve_share <= 1, "serve_share", self.serve_share, "above 0 and at most 1")
        for name in ("connect_timeout", "timeout"):
            check_field(0 < getattr(self, name) <= 300, name, getattr(self, name), "above 0 and at most 5 minutes")
        check_field(self.codec == "raw", "codec", self.codec, "'raw': peers send rows as they are in memory")
        if self.secret is not None and len(self.secret.reveal()) < _SECRET_MIN:
            raise ConfigError(f"'secret' is too short to keep strangers out. Give at least {_SECRET_MIN} characters.")
        if not (self.listen or self.peers or self.request_peers):
            raise ConfigError("A peer tier without 'listen', 'peers' and 'request_peers' does nothing. Give one.")
        self._check_listening()

    @property
    def secret_bytes(self) -> bytes:
        """The secret; empty if there is none."""
        return self.secret.reveal().encode() if self.secret is not None else b""

    def may_name(self, host: str) -> bool:
        """Tell whether a request may name a peer on a host."""
        return any(_covers(allowed, host) for allowed in self.request_peers)

    def _check_listening(self) -> None:
        if not self.listen:
            return
        if self.io == "process":
            raise ConfigError(
                "'listen' needs the primary tier's index, which the I/O process does not have. Leave out 'io' here; to "
                "load in a process of its own, give a second tier of this type with 'peers' and 'io': 'process'."
            )
        if self.tls and not (self.tls_cert and self.tls_key):
            raise ConfigError("'listen' with 'tls' needs 'tls_cert' and 'tls_key'. Give both.")
        endpoint = endpoint_of(self.listen)
        if not (endpoint.is_local or self.secret is not None or (self.tls and self.tls_ca)):
            raise ConfigError(
                f"'listen' is {self.listen}, which others can reach. Give 'secret', or 'tls' with 'tls_ca' (so that "
                "clients need a certificate), or listen on 127.0.0.1."
            )


def endpoint_of(address: str) -> Endpoint:
    """Return an address ``"host:port"`` (``"[host]:port"`` for IPv6) as an endpoint.

    Raises:
        ConfigError: It is none.
    """
    endpoint = _endpoint(address)
    if endpoint is None:
        raise ConfigError(f"{address[:80]!r} is not a valid address. Expected 'host:port'.")
    return endpoint


def _endpoint(address: str) -> Endpoint | None:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not port.isascii() or not 0 < int(port[:6]) < 65536 or len(host) > 255:
        return None
    return Endpoint(host, int(port))


def _covers(allowed: str, host: str) -> bool:
    """Tell whether a network or a name covers a host; a name covers itself only."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(allowed)
    except ValueError:
        return allowed == host
