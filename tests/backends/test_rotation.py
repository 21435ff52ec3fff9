"""Passwords, keys, secrets, authorities and certificates are replaced while a tier runs, on real servers."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

import pytest

from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from tests.backends.rotations import (
    NEW,
    OLD,
    QUICK,
    QUICK_CASES,
    SLOW_CASES,
    Case,
    Replace,
    by_link,
    by_rename,
    in_place,
    made,
    restart,
)
from tests.peer import serving as peers
from tests.peer.serving import Serving


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
    home, files = made(tmp_path / "home"), made(tmp_path / "files")
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


@pytest.mark.parametrize(
    "case",
    [
        *[pytest.param(case, id=name) for name, case in QUICK_CASES.items() if name.startswith("redis")],
        *[pytest.param(case, id=name, marks=pytest.mark.matrix) for name, case in SLOW_CASES.items()],
    ],
)
def test_refusals_count_before_a_tier_is_open(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each attempt of an optional tier to open adds to the count, which never decreases; the log has one line."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr("kvstore.files._WARN_AGAIN_S", 3600.0)
    home, files = made(tmp_path / "home"), made(tmp_path / "files")
    with case(home, files, by_link) as rotation:
        new = rotation.on_server()
        options = {**QUICK, **rotation.options, "required": False}
        with TierRig(options, namespace=Namespace(peers.FIELDS), slot_bytes=4096, slots=4, timeout_s=60) as rig:
            counts = [0]

            def are_many() -> bool:
                counts.append(rig.tier.stats().backend_counters.get("credentials_refused", 0))
                return counts[-1] > 2

            rig.until(are_many, "three refusals")
            by_link(files, new)
            rig.until(lambda: rig.tier.stats().ready, "a tier that is ready")
            counts.append(rig.tier.stats().backend_counters["credentials_refused"])
            assert counts == sorted(counts)
            assert rig.store([b"key"]).success and rig.load([b"key"]).success
    refusals = [record for record in caplog.records if "still has the refused content" in record.getMessage()]
    # Keys and authority of one tier are different files.
    assert len({record.getMessage() for record in refusals}) == len(refusals) > 0


def test_a_refused_login_is_repeated_with_the_password_that_the_file_has_by_then(tmp_path: Path) -> None:
    """A rewritten file with the time and length of the one before costs no failed connection, only a second login."""
    home, files = made(tmp_path / "home"), made(tmp_path / "files")
    with QUICK_CASES["redis-password"](home, files, by_rename) as rotation:
        options = {**QUICK, **rotation.options, "connections": 1}
        with TierRig(options, namespace=Namespace(peers.FIELDS), slot_bytes=4096, slots=4, timeout_s=60) as rig:

            def count(name: str) -> int:
                return rig.tier.stats().backend_counters.get(name, 0)

            assert rig.store([b"key"]).success
            rig.until(lambda: count("connections_opened"), "a report of the first connection")
            opened = count("connections_opened")
            path, before = files / "password", (files / "password").stat()
            rotation.on_server()
            path.write_text(NEW)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            rig.until(lambda: rig.load([b"key"]).success, "a load")
            rig.until(lambda: count("connections_opened") > opened, "a report of the second connection")
            assert count("connections_failed") == count("credentials_refused") == 0


@pytest.mark.parametrize("case", ["redis-password", "redis-authority"])
def test_a_directory_of_peers_is_used_again_after_a_rotation(case: str, tmp_path: Path) -> None:
    """The credentials of a directory's server are followed as those of a tier, and their refusals count."""
    home, files = made(tmp_path / "home"), made(tmp_path / "files")
    with QUICK_CASES[case](home, files, by_link) as rotation:
        server = {name: value for name, value in rotation.options.items() if name != "backend"}
        # The user of the tier has no rights on a directory.
        server |= {"username": "admin"} if "username" in server else {}
        directory = {**server, "networks": ["127.0.0.0/8"], "interval": "50ms"}
        options = {"backend": "peer", "directory": directory, "secret": OLD}
        with TierRig(options, namespace=Namespace(peers.FIELDS), slot_bytes=4096, slots=4, timeout_s=60) as rig:

            def successes() -> int:
                counters = rig.tier.stats().backend_counters
                return counters["directory_rounds"] - counters["directory_failures"]

            rig.until(lambda: successes() > 1, "rounds of the directory")
            new = rotation.on_server()
            rig.until(lambda: rig.tier.stats().backend_counters["credentials_refused"] > 0, "the refusal")
            before = successes()
            by_link(files, new)
            # A round counts before it ends.
            rig.until(lambda: successes() > before + 1, "rounds after the rotation")


@pytest.mark.parametrize("first", ["client", "server"])
def test_peers_accept_the_secret_before_the_last_one(first: str, tmp_path: Path) -> None:
    """While the file of only one side has changed, new connections succeed, without a refusal."""
    home, files = made(tmp_path / "home"), made(tmp_path / "files")
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
                restart(server)
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
    home, files = made(tmp_path / "home"), made(tmp_path / "files")
    for directory in (home, files):
        (directory / "secret").write_text(OLD)
    with Serving(home, secret={"file": str(home / "secret")}) as server:
        options = {"backend": "peer", "peers": [server.address], "secret": {"file": str(files / "secret")}, **QUICK}
        with TierRig(options, namespace=Namespace(peers.FIELDS), slot_bytes=peers.SLOT_BYTES, slots=4) as rig:
            assert rig.load([peers.key_of(0)]).success
            (files / "secret").write_text(NEW)
            restart(server)
            refused = "credentials_refused"
            rig.until(
                lambda: not rig.load([peers.key_of(1)]).success and rig.tier.stats().backend_counters[refused],
                "the refusal",
            )
