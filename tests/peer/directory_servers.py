"""Directory servers, and clients that write directory entries by hand, as a foreign program would."""

from __future__ import annotations

import base64
import contextlib
import math
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx2
import redis

from kvstore.namespace import Namespace
from tests.peer.holder import NAMESPACE
from tests.redis.servers import Server, free_ports, plain

KINDS = ("redis", "valkey", "etcd")


@dataclass
class EtcdServer(Server):
    """An etcd of one member."""

    @property
    def url(self) -> str:
        """See :attr:`Server.url`."""
        return f"{'etcds' if self.tls_ca else 'etcd'}://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        """Return whether the member has elected itself."""
        url = self.url.replace("etcd", "http", 1)
        with contextlib.suppress(httpx2.HTTPError):
            return "true" in httpx2.get(f"{url}/health", timeout=1, verify=context_of(self)).text
        return False


class Entry(NamedTuple):
    """An engine's entry."""

    address: bytes
    summary: bytes | None = None
    version: bytes = b"0" * 16
    seconds: float = 100


class Admin(Protocol):
    """A client with all rights on a server."""

    def write(self, entries: Iterable[Entry]) -> None:
        """Write entries of a namespace."""

    def keys(self) -> Sequence[bytes]:
        """Return all keys."""

    def close(self) -> None:
        """Disconnect."""


def server_of(kind: str, directory: Path, *arguments: str) -> Server:
    """Return a server of a kind without password, not started."""
    if kind != "etcd":
        return plain(kind, directory)
    return etcd(directory, *arguments)


def etcd(directory: Path, *arguments: str, tls: bool = False) -> EtcdServer:
    """Return an etcd, not started; ``tls`` uses the certificates of a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    port, peer_port = free_ports(2)
    scheme = "https" if tls else "http"
    own = f"{scheme}://127.0.0.1:{port}"
    options = [
        *["--data-dir", str(directory / "data"), "--listen-client-urls", own, "--advertise-client-urls", own],
        *["--listen-peer-urls", f"http://127.0.0.1:{peer_port}", "--log-level", "warn", "--unsafe-no-fsync"],
    ]
    if tls:
        options += ["--cert-file", str(directory / "server.crt"), "--key-file", str(directory / "server.key")]
    return EtcdServer("etcd", port, directory, [*options, *arguments], directory / "ca.crt" if tls else None)


def prefix_of(namespace: Namespace = NAMESPACE) -> bytes:
    """Return the prefix of a namespace's keys."""
    return f"kvpeers:{namespace.hex}:".encode()


class RedisAdmin:
    """See :class:`Admin`."""

    def __init__(self, server: Server, namespace: Namespace = NAMESPACE) -> None:
        self.client = redis.Redis(port=server.port)
        self._prefix = prefix_of(namespace)

    def write(self, entries: Iterable[Entry]) -> None:
        """See :meth:`Admin.write`."""
        pipeline = self.client.pipeline(transaction=False)
        for one in entries:
            end_ms = (time.time() + one.seconds) * 1000
            pipeline.zadd(self._prefix + b"engines", {one.address + b" " + one.version: end_ms})
            if one.summary is not None:
                pipeline.set(self._prefix + one.address, one.summary)
        pipeline.execute()

    def keys(self) -> Sequence[bytes]:
        """See :meth:`Admin.keys`."""
        return list(self.client.keys("*"))

    def close(self) -> None:
        """See :meth:`Admin.close`."""
        self.client.close()


class EtcdAdmin:
    """See :class:`Admin`."""

    def __init__(self, server: Server, namespace: Namespace = NAMESPACE) -> None:
        self._prefix = prefix_of(namespace)
        url = server.url.replace("etcd", "http", 1)
        self._client = httpx2.Client(base_url=f"{url}/v3/", verify=context_of(server), timeout=10)

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call the server; raise if it refuses."""
        answer = self._client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def write(self, entries: Iterable[Entry]) -> None:
        """See :meth:`Admin.write`. The server chooses the versions."""
        puts = []
        leases: dict[float, int] = {}
        for one in entries:
            if one.seconds not in leases:
                leases[one.seconds] = int(self.call("lease/grant", {"TTL": math.ceil(one.seconds)})["ID"])
            puts.append(
                {
                    "key": text(self._prefix + one.address),
                    "value": text(one.summary or b""),
                    "lease": leases[one.seconds],
                }
            )
        # A transaction must not contain a key twice.
        for start in range(0, len(puts), 100):
            requests = {put["key"]: {"request_put": put} for put in puts[start : start + 100]}
            self.call("kv/txn", {"success": list(requests.values())})

    def put(self, key: bytes, value: bytes) -> None:
        """Write a key without a lease."""
        self.call("kv/put", {"key": text(key), "value": text(value)})

    def delete(self, key: bytes) -> None:
        """Remove a key."""
        self.call("kv/deleterange", {"key": text(key)})

    def lease(self, key: bytes) -> int:
        """Return the lease of a key; 0 if the key is absent or has none."""
        found = self.call("kv/range", {"key": text(key), "keys_only": True}).get("kvs", [{}])
        return int(found[0].get("lease", 0))

    def revision(self) -> int:
        """Return the revision of the last change."""
        return int(self.call("kv/range", {"key": text(b"none")})["header"]["revision"])

    def keys(self) -> Sequence[bytes]:
        """See :meth:`Admin.keys`."""
        found = self.call("kv/range", {"key": text(b"\0"), "range_end": text(b"\0"), "keys_only": True})
        return [base64.b64decode(one["key"]) for one in found.get("kvs", ())]

    def close(self) -> None:
        """See :meth:`Admin.close`."""
        self._client.close()


def admin_of(server: Server, namespace: Namespace = NAMESPACE) -> RedisAdmin | EtcdAdmin:
    """Return a client with all rights on a server."""
    return (EtcdAdmin if isinstance(server, EtcdServer) else RedisAdmin)(server, namespace)


def context_of(server: Server) -> ssl.SSLContext | bool:
    """Return an SSL context that trusts the server, if it uses TLS."""
    return ssl.create_default_context(cafile=server.tls_ca) if server.tls_ca else False


def text(data: bytes) -> str:
    """Encode bytes for the gateway."""
    return base64.b64encode(data).decode("ascii")
