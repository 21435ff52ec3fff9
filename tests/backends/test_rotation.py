"""Passwords, keys, secrets, authorities and certificates are replaced while a tier runs, on real servers."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from tests.peer import serving as peers
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
            _restart(server)
            return of(home, "ca.crt")

        options = {"username": "kv", "password": server.password, "tls_ca": str(files / "ca.crt")}
        yield Rotation({"backend": "redis", "url": server.url, **options}, rotate, (server.password,))


@contextmanager
def redis_certificate(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
    """The server requires client certificates of another authority."""
    server = secured(home)
    clients = _made(home / "clients")
    make_certificates(clients)
    server.arguments[server.arguments.index("--tls-auth-clients") + 1] = "yes"
    server.arguments[server.arguments.index("--tls-ca-cert-file") + 1] = str(clients / "ca.crt")
    with running(server):
        write(files, of(clients, "server.crt", "server.key"))

        def rotate() -> Contents:
            make_certificates(clients)
            _restart(server)
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
    _restart(server)


@contextmanager
def peer_secret(home: Path, files: Path, write: Replace) -> Iterator[Rotation]:
    """The serving engine starts with another secret."""
    (home / "secret").write_text(OLD)
    write(files, {"secret": OLD.encode()})
    with Serving(home, secret={"file": str(home / "secret")}) as server:

        def rotate() -> Contents:
            (home / "secret").write_text(NEW)
            _restart(server)
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
            _restart(server)
            return of(home, *names)

        yield Rotation({"backend": "peer", "peers": [server.address], **tls(files)}, rotate, ())


def _restart(server: Server | S3Server | Serving) -> None:
    server.kill()
    server.start()


def _made(directory: Path) -> Path:
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


@pytest.mark.parametrize(
    ("case", "write"),
    [
        *[pytest.param(case, by_link, id=name) for name, case in QUICK_CASES.items()],
        *[
            pytest.param(case, way, id=f"{name}-{way.__name__}", marks=pytest.mark.matrix)
            for name, case in QUICK_CASES.items()
            for way in (in_place, by_rename)
        ],
        *[pytest.param(case, by_link, id=name, marks=pytest.mark.matrix) for name, case in SLOW_CASES.items()],
    ],
)
def test_a_tier_works_again_after_a_rotation(
    case: Case, write: Replace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier logs and counts the refusal of unchanged files, and works again after their change, without a restart."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr("kvstore.backends.s3.credentials._RENEWAL_PAUSE_S", 0.1)
    home, files = _made(tmp_path / "home"), _made(tmp_path / "files")
    numbers = itertools.count()
    caplog.set_level(logging.DEBUG, "kvstore")
    with case(home, files, write) as rotation:
        options = {**QUICK, **rotation.options}
        namespace = Namespace(peers.FIELDS)
        with TierRig(options, namespace=namespace, slot_bytes=peers.SLOT_BYTES, slots=4, timeout_s=60) as rig:

            def works() -> bool:
                if options["backend"] == "peer":
                    return rig.load([peers.key_of(next(numbers) % peers.SLOTS)]).success
                key = b"block-%d" % next(numbers)
                return rig.store([key]).success and rig.load([key]).success

            def is_refused() -> bool:
                return not works() and rig.tier.stats().backend_counters["credentials_refused"] > 0

            assert works()
            new = rotation.on_server()
            rig.until(is_refused, "the refusal")
            write(files, new)
            rig.until(works, "a tier that works")
    assert "Write the current one; it is read again without a restart." in caplog.text
    assert not [secret for secret in rotation.secrets if secret in caplog.text]


@pytest.mark.parametrize("first", ["client", "server"])
def test_peers_accept_the_secret_before_the_last_one(first: str, tmp_path: Path) -> None:
    """While the file of only one side has changed, new connections succeed, without a refusal."""
    home, files = _made(tmp_path / "home"), _made(tmp_path / "files")
    for directory in (home, files):
        (directory / "secret").write_text(OLD)
    with Serving(home, secret={"file": str(home / "secret")}) as server:
        options = {"backend": "peer", "peers": [server.address], "secret": {"file": str(files / "secret")}, **QUICK}

        def opened() -> TierRig:
            return TierRig(options, namespace=Namespace(peers.FIELDS), slot_bytes=peers.SLOT_BYTES, slots=4)

        with opened() as rig:
            assert rig.load([peers.key_of(0)]).success
            if first == "client":
                (files / "secret").write_text(NEW)
                _restart(server)
                rig.until(lambda: rig.load([peers.key_of(1)]).success, "a load with the secret of the peer")
                assert rig.tier.stats().backend_counters["credentials_refused"] == 0
        if first == "server":
            (home / "secret").write_text(NEW)
            with opened() as rig:
                assert rig.load([peers.key_of(1)]).success
                assert rig.tier.stats().backend_counters["credentials_refused"] == 0


def test_peers_refuse_an_earlier_secret_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the stated time, a peer with the secret before the last one is refused."""
    monkeypatch.setattr("kvstore.backends.peer.config._EARLIER_S", 0.0)
    home, files = _made(tmp_path / "home"), _made(tmp_path / "files")
    for directory in (home, files):
        (directory / "secret").write_text(OLD)
    with Serving(home, secret={"file": str(home / "secret")}) as server:
        options = {"backend": "peer", "peers": [server.address], "secret": {"file": str(files / "secret")}, **QUICK}
        with TierRig(options, namespace=Namespace(peers.FIELDS), slot_bytes=peers.SLOT_BYTES, slots=4) as rig:
            assert rig.load([peers.key_of(0)]).success
            (files / "secret").write_text(NEW)
            _restart(server)
            refused = "credentials_refused"
            rig.until(
                lambda: not rig.load([peers.key_of(1)]).success and rig.tier.stats().backend_counters[refused],
                "the refusal",
            )
