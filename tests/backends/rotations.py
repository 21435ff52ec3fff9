"""Tiers on real servers whose passwords, keys, secrets, authorities and certificates are about to change."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.peer.serving import Serving
from tests.redis.servers import Server, cli, make_certificates, plain, running, secured
from tests.s3 import servers as s3
from tests.s3.servers import S3Server, over_tls, weed

OLD, NEW, NEW_ID = "old-canary-of-sixteen", "new-canary-of-sixteen", "AKIANEW0000000000000"
QUICK = {"breaker_cooldown": "100ms", "breaker_cooldown_max": "500ms"}

Contents = Mapping[str, bytes]
Replace = Callable[[Path, Contents], None]


@dataclass
class Rotation:
    """A tier on a server whose credentials are about to change."""

    options: Mapping[str, Any]  # Options of the tier, with paths in its directory of files.
    on_server: Callable[[], Contents]
    """Rotates on the server, which then refuses what the files had before; returns their new content, by name."""
    secrets: tuple[str, ...] = (OLD, NEW)


Case = Callable[[Path, Path, Replace], AbstractContextManager[Rotation]]
"""Makes a rotation, given directories for the server and for the tier's files, and the way to write these."""


def in_place(files: Path, contents: Contents) -> None:
    """Rewrite files, which are empty for a moment, and then half-written."""
    for half in (0, 2, 1):
        for name, content in contents.items():
            (files / name).write_bytes(content[: len(content) // half] if half else b"")


def by_rename(files: Path, contents: Contents) -> None:
    """Replace each file by a new one."""
    for name, content in contents.items():
        (files / f"{name}.new").write_bytes(content)
        os.replace(files / f"{name}.new", files / name)


def by_link(files: Path, contents: Contents) -> None:
    """Replace all files at once, as Kubernetes does: each is a link into a linked directory, which is exchanged."""
    version = next(number for number in itertools.count() if not (files / f"..{number}").exists())
    place = files / f"..{version}"
    if version:
        shutil.copytree(files / "..data", place)
    else:
        place.mkdir()
    for name, content in contents.items():
        (place / name).write_bytes(content)
        if not (files / name).is_symlink():
            (files / name).symlink_to(Path("..data") / name)
    (files / "..next").symlink_to(place.name)
    os.replace(files / "..next", files / "..data")


def of(directory: Path, *names: str) -> Contents:
    """Return the content of files."""
    return {name: (directory / name).read_bytes() for name in names}


@contextmanager
def redis_password(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
    """The password of a user changes, and the server closes the connections."""
    server = plain("redis", home)
    with running(server):
        cli(server, "CONFIG", "SET", "requirepass", OLD)
        write(files, {"password": OLD.encode()})

        def rotate() -> Contents:
            cli(server, "-a", OLD, "CONFIG", "SET", "requirepass", NEW)
            cli(server, "-a", NEW, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            return {"password": f"{NEW}\n".encode()}

        options = {"backend": "redis", "url": server.url, "password": {"file": str(files / "password")}}
        yield Rotation(options, rotate)


@contextmanager
def redis_authority(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
    """The server gets a certificate of another authority."""
    server = secured(home)
    with running(server):
        write(files, of(home, "ca.crt"))

        def rotate() -> Contents:
            make_certificates(home)
            restart(server)
            return of(home, "ca.crt")

        options = {"username": "kv", "password": server.password, "tls_ca": str(files / "ca.crt")}
        yield Rotation({"backend": "redis", "url": server.url, **options}, rotate, (server.password,))


@contextmanager
def redis_certificate(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
    """The server requires client certificates of another authority."""
    server = secured(home)
    clients = made(home / "clients")
    make_certificates(clients)
    server.arguments[server.arguments.index("--tls-auth-clients") + 1] = "yes"
    server.arguments[server.arguments.index("--tls-ca-cert-file") + 1] = str(clients / "ca.crt")
    with running(server):
        write(files, of(clients, "server.crt", "server.key"))

        def rotate() -> Contents:
            make_certificates(clients)
            restart(server)
            return of(clients, "server.crt", "server.key")

        options = {"username": "kv", "password": server.password, "tls_ca": str(home / "ca.crt")}
        options |= {"tls_cert": str(files / "server.crt"), "tls_key": str(files / "server.key")}
        yield Rotation({"backend": "redis", "url": server.url, **options}, rotate, (server.password,))


def s3_files(client: str) -> Case:
    """Return the case of a service with another key, another secret and a certificate of another authority."""

    @contextmanager
    def case(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
        with s3.running(weed(home)) as server:
            keys = {"id": server.access_key.encode(), "secret": server.secret_key.encode()}
            write(files, {**keys, **of(home, "ca.crt")})

            def rotate() -> Contents:
                make_certificates(home)
                _rotate_keys(server)
                return {"id": NEW_ID.encode(), "secret": NEW.encode(), **of(home, "ca.crt")}

            options = _s3_options(over_tls(server), client=client, tls_ca=str(files / "ca.crt"))
            options["access_key_id"] = {"file": str(files / "id")}
            options["secret_access_key"] = {"file": str(files / "secret")}
            yield Rotation(options, rotate, (server.secret_key, NEW))

    return case


@contextmanager
def s3_profile(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
    """AWS's file of shared credentials gets new ones."""

    def text(key: str, secret: str) -> Contents:
        return {"credentials": f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n".encode()}

    with s3.running(weed(home)) as server, pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(files / "credentials"))
        write(files, text(server.access_key, server.secret_key))

        def rotate() -> Contents:
            _rotate_keys(server)
            return text(NEW_ID, NEW)

        yield Rotation(_s3_options(server), rotate, (server.secret_key, NEW))


def _s3_options(server: S3Server, **more: Any) -> dict[str, Any]:
    place = {"bucket": server.bucket, "endpoint": server.url, "region": server.region}
    return {"backend": "s3", "timeout": 20, "connect_timeout": 20, **place, **more}


def _rotate_keys(server: S3Server) -> None:
    path = server.directory / "s3.json"
    config = json.loads(path.read_text())
    config["identities"][0]["credentials"] = [{"accessKey": NEW_ID, "secretKey": NEW}]
    path.write_text(json.dumps(config))
    server.access_key, server.secret_key = NEW_ID, NEW
    restart(server)


@contextmanager
def peer_secret(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
    """The serving engine starts with another secret."""
    (home / "secret").write_text(OLD)
    write(files, {"secret": OLD.encode()})
    with Serving(home, secret={"file": str(home / "secret")}) as server:

        def rotate() -> Contents:
            (home / "secret").write_text(NEW)
            restart(server)
            return {"secret": NEW.encode()}

        options = {"backend": "peer", "peers": [server.address], "secret": {"file": str(files / "secret")}}
        yield Rotation(options, rotate)


@contextmanager
def peer_certificates(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
    """The serving engine has certificates of another authority, and requires it of clients."""
    names = ("ca.crt", "server.crt", "server.key")
    make_certificates(home)
    write(files, of(home, *names))

    def tls(directory: Path) -> dict[str, Any]:
        paths = zip(("tls_ca", "tls_cert", "tls_key"), names, strict=True)
        return {"tls": True, **{option: str(directory / name) for option, name in paths}}

    with Serving(home, **tls(home)) as server:

        def rotate() -> Contents:
            make_certificates(home)
            restart(server)
            return of(home, *names)

        yield Rotation({"backend": "peer", "peers": [server.address], **tls(files)}, rotate, ())


def restart(server: Server | S3Server | Serving) -> None:
    """Kill a server, and start it again."""
    server.kill()
    server.start()


def made(directory: Path) -> Path:
    """Return a directory, made if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


QUICK_CASES: dict[str, Case] = {
    "redis-password": redis_password,
    "redis-authority": redis_authority,
    "redis-certificate": redis_certificate,
    "peer-secret": peer_secret,
    "peer-certificates": peer_certificates,
}
SLOW_CASES: dict[str, Case] = {
    "s3-files-direct": s3_files("direct"),
    "s3-files-aioboto3": s3_files("aioboto3"),
    "s3-profile": s3_profile,
}
