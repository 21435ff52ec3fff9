"""Configuration of the peer backend."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from kvstore.backends.stream import Endpoint, check_tls_files
from kvstore.config import Seconds, SecretStr, TierConfig, check_field
from kvstore.errors import ConfigError

_SECRET_MIN: Final = 16
"""Least characters of a secret: after one connection, an attacker can test guesses offline."""

_EARLIER_S: Final = 600.0
"""Time for which the secret before a change of its file is accepted. Kubernetes updates the files of a fleet within two
minutes, and an operator without it takes some more."""

_PEERS_MAX: Final = 64
"""Most configured peers; each lookup queries all of them."""


_PORT_MIN: Final = 1024
"""Lowest port that a directory entry may name; engines do not listen on lower ports, but other services do."""

_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)

_HOST_NAME: Final = re.compile(r"([A-Za-z0-9_-]+\.)*(?!\d+\.?$)[A-Za-z0-9_-]+\.?", re.ASCII)
"""Host names. The last label is not a number, because resolvers take such names for IPv4 addresses."""


NOTHING_TO_SERVE: Final = (
    "'listen' serves blocks of kvstore's own primary tier, and there is none. Use kvstore's manager "
    "(KVStoreOffloadingSpec without 'manager': 'vllm'), or leave out 'listen'."
)


class DirectoryConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Directory server, on which engines publish summaries of their blocks and read those of others."""

    url: str  # ``redis://host:port/db``, ``rediss://…`` with TLS, or ``unix:///path?db=0``; without user and password.
    networks: tuple[str, ...]  # Permitted networks and host names of engines; entries with other addresses are ignored.
    host: str = ""  # Name or address under which other engines reach this one; empty: the host of ``listen``.
    username: str = ""  # Name of the user; empty for the default user.
    password: SecretStr | None = None  # Password of the user.
    insecure: bool = False  # Allow a connection without TLS to another machine.
    tls_ca: Path | None = None  # PEM file of the authorities to trust; without it, those of the system.
    tls_cert: Path | None = None  # PEM file of our certificate, if the server requires one.
    tls_key: Path | None = None  # PEM file of the certificate's key.
    tls_check_hostname: bool = True  # Whether the server's certificate must be for the requested host.
    prefix: str = "kvpeers:"  # Prefix of every key on the server.
    # Blocks live for minutes. A dead engine is no longer queried after three intervals, or after two failures.
    interval: Seconds = Seconds(5)
    """Pause between two rounds of publishing and reading. An engine's lease is three times as long."""
    # No request waits for the directory.
    connect_timeout: Seconds = Seconds(1)  # Time limit for connecting, and for each answer.

    def __post_init__(self) -> None:
        for name in ("interval", "connect_timeout"):
            msgspec.structs.force_setattr(self, name, Seconds(getattr(self, name)))
        check_field(0.05 <= self.interval <= 60, "interval", self.interval, "50 ms to 1 minute")
        check_field(
            0 < self.connect_timeout <= 60, "connect_timeout", self.connect_timeout, "above 0, at most 1 minute"
        )
        check_field(bool(self.networks), "networks", "empty", "networks such as '10.0.0.0/8', or host names")
        _check_networks("networks", self.networks)
        check_field(_PREFIX.fullmatch(self.prefix) is not None, "prefix", self.prefix, "1 to 64 of A-Z a-z 0-9 _ . : -")
        if "@" in self.url:
            raise ConfigError("'url' (not shown) has a user or password in it. Give 'username' and 'password'.")

    def admits(self, endpoint: Endpoint) -> bool:
        """Return whether a directory entry may make this engine connect to an endpoint."""
        return endpoint.port >= _PORT_MIN and any(_covers(allowed, endpoint.host) for allowed in self.networks)


class PeerConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Blocks in the memory and on the disks of other engines, and those that this engine serves to them."""

    aliases: ClassVar[dict[str, str]] = {"tls_ca_cert": "tls_ca"}
    has_own_load_breakers: ClassVar[bool] = True

    listen: str = ""
    """Address ``"host:port"`` where this engine serves blocks of its primary tier; empty: it serves none. Under vLLM
    the index of the data-parallel replica is added to the port."""
    peers: tuple[str, ...] = ()  # Addresses of the engines that each lookup queries; our own address is ignored.
    # The sender of a request must not be able to make an engine connect to arbitrary addresses.
    request_peers: tuple[str, ...] = ()
    """Networks and host names of the peers that a request may name, each with a port or a range of ports
    (``"10.0.0.0/8:5710"``, ``"engine-7:5710-5717"``)."""
    directory: DirectoryConfig | None = None
    """Server on which engines publish summaries of their blocks. Each lookup also queries the two engines that seem to
    have most of its blocks."""
    secret: SecretStr | None = None
    """Secret shared by all engines of a fleet; both sides of a connection prove that they have it."""
    tls: bool = False  # Whether connections are encrypted.
    tls_ca: Path | None = None  # PEM file of the authorities to trust, for servers and, if we listen, for clients.
    tls_cert: Path | None = None  # PEM file of our certificate.
    tls_key: Path | None = None  # PEM file of the certificate's key.
    tls_check_hostname: bool = True  # Whether a server's certificate must be for the requested host.
    # The next batch is transferred while one is verified. One connection saturates a link; four also use an idle core.
    connections: int = 4  # Connections to each peer for loads.
    # A peer in the same data centre answers in a millisecond.
    connect_timeout: Seconds = Seconds(1)  # Time limit for connecting and greeting.
    timeout: Seconds = Seconds(1)
    """Time limit for one answer, plus the time for its bytes at ``bytes_per_second_min``; then the connection is
    closed. On the serving side, the limit for the transfer of one block, and so for the loan of its row."""
    # Every engine of a fleet may open a few connections.
    serve_connections: int = 256  # Most connections served at once.
    # Waiting for a stopped peer must take less time than recomputing a short prompt. A lookup takes one round trip.
    lookup_timeout: Seconds = Seconds("500ms")
    load_timeout: Seconds = Seconds(2)
    # Another engine's memory turns over within seconds; a disk takes hours.
    positive_ttl: Seconds = Seconds(5)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("listen", "peers"):
            for address in (self.listen,) if name == "listen" else self.peers:
                if address or name == "peers":
                    check_field(_endpoint(address) is not None, name, address, "'host:port'")
        check_field(len(self.peers) <= _PEERS_MAX, "peers", f"{len(self.peers)} addresses", f"at most {_PEERS_MAX}")
        check_field(1 <= self.connections <= 64, "connections", self.connections, "1 to 64")
        check_field(1 <= self.serve_connections <= 65536, "serve_connections", self.serve_connections, "1 to 65536")
        for name in ("connect_timeout", "timeout"):
            check_field(0 < getattr(self, name) <= 300, name, getattr(self, name), "above 0 and at most 5 minutes")
        check_field(self.codec == "raw", "codec", self.codec, "'raw': peers send rows as they are in memory")
        if self.secret is not None:
            self.secret.require(_check_length)
        if not (self.listen or self.peers or self.request_peers or self.directory):
            raise ConfigError(
                "A peer tier without 'listen', 'peers', 'request_peers' and 'directory' does nothing. Give one."
            )
        for entry in self.request_peers:
            check_field(
                _places(entry) is not None,
                "request_peers",
                entry,
                "a network or host name with a port or ports, such as '10.0.0.0/8:5710' or 'engine-7:5710-5717'",
            )
        _check_networks("request_peers", self._request_networks)
        check_tls_files(self, is_encrypted=self.tls, remedy="Set 'tls' to true")
        self._check_strangers()
        self._check_listening()
        self._check_directory()

    def secret_bytes(self, *, earlier: bool = False) -> bytes:
        """Return the secret as bytes; empty if there is none.

        ``earlier``: return the one before the last change of its file, if that was within ``_EARLIER_S``.
        """
        if self.secret is None:
            return b""
        found = self.secret.earlier(_EARLIER_S) if earlier else None
        return (found or self.secret.reveal()).encode()

    def may_name(self, endpoint: Endpoint) -> bool:
        """Return whether a request may name a peer at an endpoint."""
        places = filter(None, map(_places, self.request_peers))
        return any(endpoint.port in ports and _covers(network, endpoint.host) for network, ports in places)

    @property
    def _request_networks(self) -> list[str]:
        return [network for network, _ in filter(None, map(_places, self.request_peers))]

    @property
    def published(self) -> Endpoint | None:
        """Address of this engine in the directory; None if it does not listen, or without a directory."""
        if not self.listen or self.directory is None:
            return None
        endpoint = endpoint_of(self.listen)
        return Endpoint(self.directory.host or endpoint.host, endpoint.port)

    def _check_strangers(self) -> None:
        """Check that engines of other machines have to prove that they belong to the fleet."""
        # 'tls_ca' without 'tls' has been refused before.
        if self.secret is not None or self.tls_ca:
            return
        hosts = {
            "listen": [endpoint_of(self.listen).host] if self.listen else [],
            "peers": [endpoint_of(address).host for address in self.peers],
            "request_peers": self._request_networks,
            "directory": self.directory.networks if self.directory is not None else (),
        }
        for name, found in hosts.items():
            for host in found:
                if not _is_loopback(host):
                    raise ConfigError(
                        f"{name!r} has {host!r}, beyond this machine, so engines must prove that they belong to the "
                        "fleet. Give 'secret', or 'tls' with 'tls_ca', or only addresses of 127.0.0.0/8."
                    )

    def _check_directory(self) -> None:
        if self.directory is None:
            return
        endpoint = self.published
        if endpoint is not None and not self.directory.admits(endpoint):
            raise ConfigError(
                f"Other engines would not connect to {endpoint}: 'networks' of 'directory' do not cover it, or the "
                f"port is below {_PORT_MIN}. Give 'host' of 'directory' the address by which they reach this engine."
            )

    def _check_listening(self) -> None:
        if not self.listen:
            return
        if self.io == "process":
            raise ConfigError(
                "'listen' needs the primary tier's index, which the I/O process does not have. Leave out 'io' here; to "
                "load in a process of its own, give a second tier of this type with 'peers'."
            )
        if self.tls and not (self.tls_cert and self.tls_key):
            raise ConfigError("'listen' with 'tls' needs 'tls_cert' and 'tls_key'. Give both.")


def _check_length(secret: str) -> None:
    if len(secret) < _SECRET_MIN:
        raise ConfigError(f"'secret' is too short to keep strangers out. Give at least {_SECRET_MIN} characters.")


def endpoint_of(address: str) -> Endpoint:
    """Return an address ``"host:port"`` (``"[host]:port"`` for IPv6) as an endpoint."""
    endpoint = _endpoint(address)
    if endpoint is None:
        raise ConfigError(f"{address[:80]!r} is not a valid address. Expected 'host:port'.")
    return endpoint


def _endpoint(address: str) -> Endpoint | None:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not _is_host(host) or not port.isdecimal() or not port.isascii() or not 0 < int(port[:6]) < 65536:
        return None
    return Endpoint(host, int(port))


def _places(entry: str) -> tuple[str, range] | None:
    """Return the network or host name of an entry of ``request_peers``, and its ports; None if it is invalid."""
    network, _, ports = entry.rpartition(":")
    if ":" in network:
        network = network[1:-1] if network[0] == "[" and network[-1] == "]" else ""
    first, dash, last = ports.partition("-")
    ends = [int(port[:6]) if port.isdecimal() and port.isascii() else 0 for port in (first, last if dash else first)]
    return (network, range(ends[0], ends[1] + 1)) if network and 0 < ends[0] <= ends[1] < 65536 else None


def _check_networks(name: str, networks: Sequence[str]) -> None:
    """Raise ConfigError for a network that would cover no address, such as one with bits after its prefix."""
    for network in networks:
        expected = "a network such as '10.0.0.0/8', or a host name"
        if "/" not in network:
            check_field(_is_host(network), name, network, expected)
        else:
            try:
                expected = str(ipaddress.ip_network(network, strict=False))
                ipaddress.ip_network(network)
            except ValueError:
                check_field(False, name, network, expected)


def _is_host(host: str) -> bool:
    """Return whether a text is an IP address, or may be a host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return len(host) <= 255 and _HOST_NAME.fullmatch(host) is not None
    return True


def _is_loopback(allowed: str) -> bool:
    """Return whether a network or name covers only this machine."""
    try:
        return allowed == "localhost" or ipaddress.ip_network(allowed).is_loopback
    except ValueError:
        return False


def _covers(allowed: str, host: str) -> bool:
    """Return whether a network or name covers a host; a name covers only itself."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(allowed)
    except ValueError:
        return allowed == host
