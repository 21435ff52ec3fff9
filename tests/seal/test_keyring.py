"""The keyring: its sources, its refusals, changes while in use, and no keys in any text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore.codec.keyring import Keyring, KeySource, hkdf_sha256, new_document
from kvstore.config import decode_config
from kvstore.errors import ConfigError
from tests.no_threads import no_threads
from tests.seal.keyrings import document, secret, soon, write


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def is_read(ring: Keyring) -> bool:
    """Return whether no reading of a keyring is under way."""
    return repr(ring).endswith(", read)")


def test_hkdf_is_that_of_the_rfc() -> None:
    """RFC 5869, test cases 1 and 3: the first 32 bytes."""
    secret_bytes = b"\x0b" * 22
    first = hkdf_sha256(secret_bytes, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert first.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert hkdf_sha256(secret_bytes, b"", b"").hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    )


def test_both_sources_give_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file and an environment variable are read in the same way."""
    path = write(tmp_path / "keys", document(1, 7, salts={"acme": secret(9)}, names=secret(8)))
    monkeypatch.setenv("KV_KEYRING", path.read_text())
    for source in (KeySource(file=path), KeySource(env="KV_KEYRING")):
        keys = Keyring(source).keys
        assert (keys.current, dict(keys.masters)) == (7, {1: b"\x01" * 32, 7: b"\x07" * 32})
        assert (dict(keys.salts or {}), keys.names) == ({"acme": b"\x09" * 32}, b"\x08" * 32)


def test_a_new_document_is_a_keyring(tmp_path: Path) -> None:
    """The result of new_document is usable unchanged, and differs each time."""
    assert new_document() != new_document()
    (tmp_path / "keys").write_text(new_document(("acme",)))
    keys = Keyring(KeySource(file=tmp_path / "keys")).keys
    assert keys.has(1, "acme") and not keys.has(1, "other") and len(keys.names) == 32


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "names 0 sources"),
        ({"env": "A", "file": "/b"}, "names 2 sources"),
        ({"file": "/b", "refresh": 0}, "refresh"),
        ({"fil": "/b"}, "Did you mean 'file'"),
        ({"env": "KV_THERE_IS_NONE"}, "is not set"),
        ({"file": "/dev/zero"}, "not a regular file"),
        ({"file": "/no/such/keyring"}, "can't be read"),
    ],
)
def test_a_source_that_can_not_be_used_is_refused(given: dict[str, Any], says: str) -> None:
    """A source is exactly one of two and readable; the error names it."""
    with pytest.raises(ConfigError, match=says):
        Keyring(decode_config(KeySource, given, where="keyring"))


def test_a_document_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """A file of more than a megabyte is the wrong file, even if it begins with a keyring."""
    path = write(tmp_path / "keys", document(1))
    path.write_text(path.read_text().ljust((1 << 20) + 1))
    with pytest.raises(ConfigError, match="longer than 1048576 bytes"):
        Keyring(KeySource(file=path))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o440, False), (0o604, True), (0o660, True)])
def test_a_keyring_that_others_may_use_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    """A keyring readable by all, or writable by others, causes one warning and is used all the same."""
    path = write(tmp_path / "keys", document(1))
    path.chmod(mode)
    ring = Keyring(KeySource(file=path))
    assert ring.keys.current == Keyring(KeySource(file=path)).keys.current == 1
    told = [record.getMessage() for record in caplog.records if "has mode" in record.getMessage()]
    assert len(told) == warned
    assert all(f"{mode:04o}" in text and str(path) in text for text in told)


@pytest.mark.parametrize("kind", ["file", "env"])
@pytest.mark.parametrize(
    "key",
    [
        secret(1),
        "/" + secret(200)[1:],
        "f0/" * 10 + "f0f0==",
        "a1b2c3d4" * 8,
        "A1B2C3D4" * 8,
        "MFRGGZDFMZTWQ2LKNNWG23TPOBYXE43U",
        "eyJhbGciOiJub25lIn0.eyJrZXkiOiJodW50ZXIyIn0.c2ln",
        "https://user:hunter2@vault/v1/secret?token=hunter2",
        "/tmp/hunter2/hunter2/keys",
        "correct horse battery staple",
        json.dumps(document(1)),
        "hunter2" * 800,
        "hunter2\0hunter2",
    ],
    ids=range(13),
)
def test_a_key_in_the_place_of_its_source_is_not_shown(kind: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key in place of its path or variable: the error contains no six consecutive characters of the key."""
    monkeypatch.delenv(key.replace("\0", ""), raising=False)
    with pytest.raises(ConfigError) as caught:
        Keyring(decode_config(KeySource, {kind: key}, where="keyring"))
    error: BaseException | None = caught.value
    # The name of a directory of this machine is not secret.
    hidden = key.removeprefix("/tmp/")
    while error is not None:
        found = [hidden[i : i + 6] for i in range(len(hidden) - 5) if hidden[i : i + 6] in str(error)]
        assert not found, f"{found} in {error}"
        error = error.__cause__


def test_a_source_that_is_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error names a missing keyring in an existing directory, and a variable."""
    monkeypatch.setenv("odd", "no keyring")
    for given, name in (
        ({"file": str(tmp_path / "kvstore_keys")}, "kvstore_keys"),
        ({"file": str(tmp_path)}, tmp_path.name),
        ({"env": "KV_THERE_IS_NONE"}, "'KV_THERE_IS_NONE'"),
        ({"env": "odd"}, "'odd'"),
    ):
        with pytest.raises(ConfigError) as caught:
            Keyring(decode_config(KeySource, given, where="keyring"))
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match=r"17 characters"):
        Keyring(KeySource(file=Path("/no/such/keyring1")))


GOOD = document(1)


@pytest.mark.parametrize(
    "text",
    [
        "hunter2",
        json.dumps(["hunter2"]),
        "[" * 100_000,
        json.dumps({"hunter2": 1}),
        json.dumps({"current": 1, "keys": "hunter2"}),
        json.dumps({**GOOD, "current": "hunter2"}),
        json.dumps({**GOOD, "current": True}),
        json.dumps({**GOOD, "current": 2}),
        json.dumps({"keys": GOOD["keys"]}),
        json.dumps({**GOOD, "keys": {"hunter2": secret(1)}}),
        json.dumps({"current": 0, "keys": {"0": secret(1)}}),
        json.dumps({"current": 2**32, "keys": {"4294967296": secret(1)}}),
        json.dumps({**GOOD, "keys": {"1": "hunter2"}}),
        json.dumps({**GOOD, "keys": {"1": secret(1)[:-4]}}),
        json.dumps({**GOOD, "salts": ["hunter2"]}),
        json.dumps({**GOOD, "salts": {"hunter2": "hunter2"}}),
        json.dumps({**GOOD, "names": "hunter2"}),
    ],
)
def test_a_bad_document_is_refused_and_never_shown(tmp_path: Path, text: str) -> None:
    """For any invalid document, the error gives the place and quotes none of its content."""
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Keyring(KeySource(file=tmp_path / "keys"))
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error) and secret(1)[:8] not in str(error)
        error = error.__cause__
    assert str(tmp_path) in str(caught.value)


def test_nothing_printed_holds_a_key(tmp_path: Path) -> None:
    """The repr of a keyring, of its keys and of its source contains no key in any encoding."""
    path = write(tmp_path / "keys", document(1, salts={"t": secret(2)}, names=secret(3)))
    ring = Keyring(KeySource(file=path))
    shown = f"{ring!r} {ring.keys!r} {ring.keys} {KeySource(file=path)!r}"
    for number in (1, 2, 3):
        raw = bytes([number]) * 32
        assert secret(number)[:8] not in shown and raw.hex()[:16] not in shown and repr(raw)[2:12] not in shown


def test_a_change_is_seen_after_the_period(tmp_path: Path) -> None:
    """A new document is used after ``refresh`` and not before, is read in the background, and replaces all keys."""
    clock = Clock()
    path = write(tmp_path / "keys", document(1))
    ring = Keyring(KeySource(file=path, refresh=30), clock)
    write(path, document(2))
    clock.now += 29
    assert ring.keys.current == 1
    clock.now += 1
    assert ring.keys.current == 1  # This use starts the read and does not wait for it.
    soon(lambda: ring.keys.current == 2, what="the new key")
    assert set(ring.keys.masters) == {2}


def test_unknown_key_ids_cause_a_bounded_number_of_reads(tmp_path: Path) -> None:
    """A record of an unknown key starts a read; a thousand such records within a second start no further one."""
    clock = Clock()
    path = write(tmp_path / "keys", document(1))
    ring = Keyring(KeySource(file=path, refresh=3600), clock)
    write(path, document(1, 2))
    ring.note_unknown()
    assert is_read(ring) and 2 not in ring.keys.masters
    clock.now += 1
    for _ in range(1000):
        ring.note_unknown()
    soon(lambda: 2 in ring.keys.masters and is_read(ring), what="the new key")
    write(path, document(1, 2, 3))
    for _ in range(1000):
        ring.note_unknown()
        # A new read shows here at once; if it has ended already, so does its key.
        assert is_read(ring) and 3 not in ring.keys.masters


def test_a_reading_that_fails_keeps_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing or incomplete keyring causes one warning per minute, and the keys stay."""
    clock = Clock()
    path = write(tmp_path / "keys", document(1))
    ring = Keyring(KeySource(file=path, refresh=1), clock)
    path.write_text('{"current": 2, "keys": {"2": "hunter2')
    for _ in range(20):
        clock.now += 1
        assert ring.keys.current == 1
        soon(lambda: is_read(ring), what="the end of the reading")
    assert len(caplog.records) == 1 and "hunter2" not in caplog.text and str(path) in caplog.text


def test_a_process_without_threads_to_spare_keeps_its_keys(tmp_path: Path) -> None:
    """If no thread can be started, the keys stay; a later use reads them again."""
    clock = Clock()
    path = write(tmp_path / "keys", document(1))
    ring = Keyring(KeySource(file=path, refresh=1), clock)
    write(path, document(2))
    clock.now += 1
    with no_threads():
        assert ring.keys.current == 1
    soon(lambda: ring.keys.current == 2, what="the new key")


def test_missing_key_is_one_warning_until_keys_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing key causes one warning per key id, however long it is missing, and another after any change of keys."""
    clock = Clock()
    path = write(tmp_path / "keys", document(1))
    ring = Keyring(KeySource(file=path, refresh=1), clock)
    for _ in range(100):
        ring.warn_of_missing("is not here", 5, "Look.")
        ring.warn_of_missing("is not here", 6, "Look.")
        clock.now += 100
    assert [record.getMessage()[:5] for record in caplog.records] == ["Key 5", "Key 6"]
    write(path, document(1, 7))

    def read() -> bool:
        clock.now += 1
        return 7 in ring.keys.masters

    soon(read, what="the new key")
    soon(lambda: is_read(ring), what="the end of the reading")
    caplog.clear()
    for _ in range(3):
        ring.warn_of_missing("is not here", 5, "Look.")
    assert len(caplog.records) == 1
    for key_id in range(10_000):
        ring.warn_of_missing("is not here", key_id, "Look.")
    assert len(caplog.records) < 300


def test_warnings_are_few(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same problem with the same key is logged once a minute, and a forger's key ids do not fill the log."""
    clock = Clock()
    ring = Keyring(KeySource(file=write(tmp_path / "keys", document(1))), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            ring.warn("is odd", 5, "Look.")
        assert len(caplog.records) == 1 and "Key 5" in caplog.text
        clock.now += 61
        ring.warn("is odd", 5, "Look.")
        assert len(caplog.records) == 2
        for key_id in range(10_000):
            ring.warn("is odd", key_id, "Look.")
    assert len(caplog.records) < 300
