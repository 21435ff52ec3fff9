"""Options of the peer tier: refused values and their error messages."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.backends.peer import PeerBackend, PeerConfig
from kvstore.backends.peer.config import endpoint_of
from kvstore.backends.stream import Endpoint
from kvstore.config import decode_config
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.tiers import open_tier

SECRET = "a secret of sixteen"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "does nothing"),
        ({"listen": "0.0.0.0:5710"}, "beyond this machine"),
        ({"listen": "[::]:5710"}, "beyond this machine"),
        ({"listen": "10.0.0.1:5710", "tls": True, "tls_cert": "c", "tls_key": "k"}, "beyond this machine"),
        ({"listen": "127.0.0.1:5710", "tls": True}, "needs 'tls_cert' and 'tls_key'"),
        ({"listen": "127.0.0.1:5710", "io": "process"}, "a second tier of this type"),
        ({"listen": "5710"}, "'host:port'"),
        ({"listen": "host:0"}, "'host:port'"),
        ({"listen": "host:65536"}, "'host:port'"),
        ({"peers": ["host:port"]}, "'host:port'"),
        ({"peers": [""]}, "'host:port'"),
        ({"peers": [f"host-{i}:1" for i in range(65)]}, "at most 64"),
        ({"peers": ["a:1"], "secret": "short"}, "at least 16 characters"),
        ({"peers": ["a:1"], "connections": 0}, "1 to 64"),
        ({"peers": ["a:1"], "timeout": 0}, "above 0"),
        ({"peers": ["a:1"], "codec": "zstd"}, "'raw'"),
        ({"peer": ["a:1"]}, "Did you mean 'peers'"),
        ({"peers": ["10.0.0.2:5710"]}, "'peers' has '10.0.0.2', beyond this machine"),
        ({"request_peers": ["127.0.0.1:1", "10.0.0.0/8:1"]}, "'request_peers' has '10.0.0.0/8', beyond this machine"),
        ({"request_peers": ["engine-7:5710"]}, "Give 'secret', or 'tls' with 'tls_ca'"),
        ({"request_peers": ["10.0.0.0/8:5710"], "tls": True}, "Give 'secret', or 'tls' with 'tls_ca'"),
        ({"directory": {"url": "redis://127.0.0.1", "networks": ["10.0.0.0/8"]}}, "'directory' has '10.0.0.0/8'"),
        ({"request_peers": ["10.0.0.1/8:1"], "secret": SECRET}, "'request_peers' is '10.0.0.1/8'. Expected 10.0.0.0/8"),
        *(
            ({"request_peers": [entry], "secret": SECRET}, "with a port or ports, such as '10.0.0.0/8:5710'")
            for entry in ("10.0.0.0/8", "engine-7", "::1", "fd00::/8:1", ":5710", "a:0", "a:2-1", "a:1-", "a:1-65536")
        ),
        *(
            ({"request_peers": [f"{host}:5710"], "secret": SECRET}, "'request_peers' is '.*. Expected a network")
            for host in ("10.0.0.*", "10.0.0.300", "10.0.0", "engine 7", "x" * 300, "engine-*")
        ),
        ({"peers": ["10.0.0.300:5710"], "secret": SECRET}, "Expected 'host:port'"),
        ({"peers": ["127.0.0.1:٥٧"]}, "Expected 'host:port'"),
        ({"peers": ["127.0.0.1:1"], "tls_ca": "a", "tls_key": "k"}, "'tls_ca' and 'tls_key' would be .* Set 'tls' to"),
        ({"listen": "127.0.0.1:1", "secret": SECRET, "tls_cert": "c"}, "'tls_cert' would be ignored"),
        ({"peers": ["127.0.0.1:1"], "tls": True, "tls_key": "k"}, "'tls_key' would be ignored without 'tls_cert'"),
        (
            {"directory": {"url": "redis://127.0.0.1", "networks": ["10.0.0.300"]}, "secret": SECRET},
            "'networks' is '10.0.0.300'. Expected a network such as",
        ),
        (
            {"directory": {"url": "redis://127.0.0.1", "networks": ["10.0.0.0/33"]}, "secret": SECRET},
            "Expected a network such as '10.0.0.0/8', or a host name",
        ),
    ],
)
def test_unusable_options_are_refused_with_a_remedy(options: dict[str, Any], says: str) -> None:
    """An unusable option prevents the start with an error that gives a remedy."""
    with pytest.raises(ConfigError, match=says):
        decode_config(PeerConfig, options, where="peer tier")


@pytest.mark.parametrize(
    "options",
    [
        {"listen": "127.0.0.1:5710"},
        {"listen": "localhost:5710"},
        {"listen": "[::1]:5710"},
        {"listen": "0.0.0.0:5710", "secret": SECRET},
        {"listen": "10.0.0.1:5710", "tls": True, "tls_cert": "c", "tls_key": "k", "tls_ca": "a"},
        {"peers": ["a:1", "[fe80::1]:2"], "io": "process", "secret": SECRET},
        {"request_peers": ["10.0.0.0/8:5710", "engine-7:5710-5717"], "secret": SECRET},
        {"request_peers": ["10.0.0.0/8:5710"], "tls": True, "tls_ca": "a"},
        {"request_peers": ["127.0.0.0/8:5710", "[::1]:5710", "localhost:5710"], "peers": ["127.0.0.1:5711"]},
        {
            "request_peers": ["10.0.0.1:1", "engine_7.pool-2.example.:1", "7eleven:1", "[fe80::1%eth0]:1"],
            "secret": SECRET,
        },
        {"directory": {"url": "redis://127.0.0.1", "networks": ["127.0.0.0/8"]}},
    ],
)
def test_usable_options_are_accepted(options: dict[str, Any]) -> None:
    """On loopback no more options are needed; beyond it, a secret or certificates of the fleet."""
    decode_config(PeerConfig, options, where="peer tier")


def test_a_secret_is_never_shown() -> None:
    """Neither the configuration nor an error about it shows the secret."""
    config = PeerConfig(peers=("a:1",), secret=SECRET)
    assert SECRET not in repr(config) and config.secret_bytes() == SECRET.encode()
    with pytest.raises(ConfigError) as error:
        PeerConfig(peers=("a:1",), secret="hunter2")
    assert "hunter2" not in str(error.value)


def test_which_peers_a_request_may_name() -> None:
    """Networks cover their addresses, names cover themselves, each on its ports only; an empty list covers nothing."""
    config = PeerConfig(request_peers=("10.0.0.0/8:5710", "[fd00::/8]:5710-5712", "engine-7:80"), secret=SECRET)
    named = ("10.1.2.3", 5710), ("fd00::1", 5710), ("fd00::1", 5712), ("engine-7", 80)
    assert all(config.may_name(Endpoint(*address)) for address in named)
    hosts = [(host, 5710) for host in ("11.0.0.1", "::1", "engine-70", "engine-7", "localhost", "")]
    ports = ("10.1.2.3", 5711), ("10.1.2.3", 22), ("fd00::1", 5709), ("fd00::1", 5713), ("engine-7", 5710)
    assert not any(config.may_name(Endpoint(*address)) for address in (*hosts, *ports))
    assert not PeerConfig(peers=("a:1",), secret=SECRET).may_name(Endpoint("a", 1))


def test_addresses() -> None:
    """Addresses are a host and a port, including IPv6."""
    assert endpoint_of("host:1") == Endpoint("host", 1)
    assert endpoint_of("[fe80::1]:65535") == Endpoint("fe80::1", 65535)


def test_listening_needs_a_primary_tier() -> None:
    """Without a primary tier to serve from, the tier does not open and gives the reason."""
    memory = memoryview(bytearray(8192))
    with pytest.raises(ConfigError, match="kvstore's own primary tier"):
        open_tier(
            {"backend": "peer", "listen": "127.0.0.1:21"},
            primary=memory,
            slot_bytes=4096,
            namespace=Namespace({"suite": "peer"}),
        )


def test_no_stores() -> None:
    """The tier supports loads only."""
    assert PeerBackend.takes_stores is False
