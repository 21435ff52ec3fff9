"""Tiers that are not required, on a machine that lacks something at the start, or loses a directory later."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.memory import MemoryBackend
from kvstore.errors import BackendError, BackendUnavailableError, ConfigError
from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from kvstore.tiers.opening import check_tier
from kvstore.types import RemovalCause
from tests.peer import serving as peers
from tests.redis.servers import cli, plain, running, secured
from tests.s3 import servers as s3
from tests.s3.servers import moto

SECRET = "canary-of-many-characters"
QUICK = {"breaker_cooldown": "50ms", "breaker_cooldown_max": "200ms"}

Absence = Callable[[Path], AbstractContextManager[tuple[dict[str, Any], Callable[[], object]]]]
"""Yields the options of a tier, and the call that adds what the machine lacks."""


@contextmanager
def drive(home: Path) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """The directory of a drive that is not mounted."""
    yield {"backend": "file", "path": str(home / "drive" / "kv"), "capacity": "64MiB"}, (home / "drive").mkdir


@contextmanager
def redis_server(home: Path) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """A server that is down."""
    server = plain("redis", home)
    with running():
        try:
            yield {"backend": "redis", "url": server.url}, server.start
        finally:
            server.kill()


@contextmanager
def redis_password(home: Path) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """A file with a password, which is there, but empty, before it is complete."""
    with running(server := plain("redis", home)):
        cli(server, "CONFIG", "SET", "requirepass", SECRET)
        (path := home / "password").touch()
        yield (
            {"backend": "redis", "url": server.url, "password": {"file": str(path)}},
            lambda: path.write_text(SECRET),
        )


@contextmanager
def redis_authority(home: Path) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """A file with an authority."""
    with running(server := secured(home)):
        path = home / "later.crt"
        options = {"username": "kv", "password": server.password, "tls_ca": str(path)}
        yield {"backend": "redis", "url": server.url, **options}, lambda: shutil.copy(home / "ca.crt", path)


@contextmanager
def s3_secret(home: Path) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """A file with the secret of a key."""
    with s3.running(moto(home)) as server:
        path = home / "secret"
        place = {"bucket": server.bucket, "endpoint": server.url, "region": server.region}
        keys = {"access_key_id": server.access_key, "secret_access_key": {"file": str(path)}}
        yield {"backend": "s3", **place, **keys}, lambda: path.write_text(server.secret_key)


@contextmanager
def peer_secret(home: Path) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """A file with the secret of a fleet."""
    with peers.Serving(home, secret=SECRET) as server:
        path = home / "secret"
        options = {"backend": "peer", "peers": [server.address], "secret": {"file": str(path)}}
        yield options, lambda: path.write_text(SECRET)


ABSENCES: list[Absence] = [drive, redis_server, redis_password, redis_authority, s3_secret, peer_secret]


@pytest.mark.parametrize("absence", ABSENCES, ids=lambda absence: absence.__name__)
def test_an_optional_tier_is_used_once_the_machine_has_it_all(absence: Absence, tmp_path: Path) -> None:
    """The tier opens, is not ready, and works by time alone after the repair; a required one refuses to open."""
    with absence(tmp_path) as (options, repair):
        config = {**options, **QUICK, "required": False}
        check_tier(config)
        place: dict[str, Any] = {"namespace": Namespace(peers.FIELDS), "slot_bytes": peers.SLOT_BYTES, "slots": 4}
        with pytest.raises((ConfigError, BackendError)):
            TierRig({**config, "required": True}, **place)
        with TierRig(config, **place, timeout_s=60) as rig:
            rig.step()
            assert not rig.tier.stats().ready
            repair()
            rig.until(lambda: rig.tier.stats().ready, "a tier that is ready without any request")
            if options["backend"] == "peer":
                assert rig.load([peers.key_of(0)]).success
            else:
                assert rig.store([b"key"]).success
                assert rig.load([b"key"]).success


class LateBackend(MemoryBackend):
    """A medium that is absent for many attempts."""

    absences: ClassVar[int] = 0

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        if LateBackend.absences:
            LateBackend.absences -= 1
            raise BackendUnavailableError("absent", backend=self.name)
        await super().open(namespace, geometry)


def test_pauses_between_attempts_do_not_grow_without_bound() -> None:
    """After twenty absences, whose doubled pauses would last for hours, the medium is used soon."""
    LateBackend.absences = 20
    config = {"backend": f"{__name__}:LateBackend", "breaker_cooldown": "10ms", "breaker_cooldown_max": "20ms"}
    with TierRig(
        {**config, "required": False}, namespace=Namespace({"a": 1}), slot_bytes=4096, slots=4, timeout_s=60
    ) as rig:
        rig.until(lambda: rig.tier.stats().ready, "a tier that is ready")
        assert rig.store([b"key"]).success


@pytest.mark.parametrize("io", ["thread", "process"])
def test_misspelt_options_are_errors_of_optional_tiers_too(io: str, tmp_path: Path) -> None:
    """A wrong value ends the start of a tier that is not required, too."""
    (tmp_path / "ca.crt").write_text("no certificate")
    wrong: list[dict[str, Any]] = [
        {"backend": "redis", "url": "rediss://127.0.0.1:1", "tls_ca": str(tmp_path / "ca.crt")},
        {"backend": "redis", "password": {"env": "KVSTORE_TEST_NOT_SET"}},
        {"backend": "file", "path": str(tmp_path / "kv"), "capacity": "1"},
        {"backend": "file", "path": str(tmp_path / "ca.crt"), "capacity": "64MiB"},
    ]
    for options in wrong:
        with pytest.raises(ConfigError):
            TierRig({**options, "io": io, "required": False}, namespace=Namespace({"a": 1}), slot_bytes=4096, slots=4)


def test_a_deleted_directory_is_made_again(tmp_path: Path) -> None:
    """After a deletion of its directory a tier loses its blocks, is not ready, and stores into a new directory."""
    path = tmp_path / "parent" / "kv"
    path.parent.mkdir()
    config = {"backend": "file", "path": str(path), "capacity": "64MiB", **QUICK}
    with TierRig(config, namespace=Namespace({"a": 1}), slot_bytes=4096, slots=4, timeout_s=60) as rig:
        assert rig.store([b"old"]).success
        shutil.rmtree(path.parent)
        rig.until(lambda: not rig.tier.stats().ready, "the tier is not ready")
        rig.until(lambda: rig.tier.stats().removals.get(RemovalCause.LOST.value), "the loss of its block")
        path.parent.mkdir()
        rig.until(lambda: rig.tier.stats().ready, "the tier is ready")
        assert path.is_dir()
        assert not rig.load([b"old"]).success
        assert rig.store([b"new"]).success
        assert rig.load([b"new"]).success


def test_a_peer_that_does_not_answer_is_not_ready(tmp_path: Path) -> None:
    """A tier whose only peer is down is not ready until the peer answers again."""
    with peers.Serving(tmp_path) as server:
        config = {"backend": "peer", "peers": [server.address], **QUICK, "positive_ttl": 0}
        place: dict[str, Any] = {"namespace": Namespace(peers.FIELDS), "slot_bytes": peers.SLOT_BYTES, "slots": 4}
        with TierRig(config, **place, timeout_s=60) as rig:
            assert rig.load([peers.key_of(0)]).success
            server.kill()
            rig.until(
                lambda: not rig.load([peers.key_of(0)]).success and not rig.tier.stats().ready, "the tier is not ready"
            )
            server.start()
            rig.until(lambda: rig.load([peers.key_of(0)]).success and rig.tier.stats().ready, "the tier is ready")
