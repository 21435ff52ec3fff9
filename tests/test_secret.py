"""Secrets come from text, environment or file, and are never shown."""

from __future__ import annotations

import copy
import json
import logging
import os
import traceback
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.config import TierConfig, decode_config, encode_config
from kvstore.errors import AbsentError, ConfigError
from kvstore.secret import SecretStr, shown

SECRET = "hunter2-correct-horse"


class RemoteConfig(TierConfig, kw_only=True, frozen=True):
    """A tier with secrets."""

    url: str = ""
    password: SecretStr | None = None
    port: int = 1
    access_key_id: int = 0
    headers: dict[str, str] = msgspec.field(default_factory=dict)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    """A file with the secret and a line ending."""
    path = tmp_path / "secret"
    path.write_text(SECRET + "\r\n")
    return path


def test_three_sources(monkeypatch: pytest.MonkeyPatch, secret_file: Path) -> None:
    """A secret is given as text, by an environment variable, or by a file."""
    monkeypatch.setenv("KV_TEST_SECRET", SECRET)
    for source in (SECRET, {"env": "KV_TEST_SECRET"}, {"file": str(secret_file)}):
        assert SecretStr(source).reveal() == SECRET
        assert decode_config(RemoteConfig, {"password": source}, where="x").password == SecretStr(SECRET)
        assert RemoteConfig(password=source).password == SecretStr(SECRET)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_marks_and_line_ends_of_a_file_are_no_part_of_it(tmp_path: Path, start: str, ending: str) -> None:
    """Editors add a byte order mark and line ends; spaces may belong to a secret; a file with only a mark is empty."""
    path = tmp_path / "secret"
    path.write_text(f"{start} {SECRET} {ending}", newline="")
    assert SecretStr({"file": str(path)}).reveal() == f" {SECRET} "
    path.write_text(start + ending, newline="")
    with pytest.raises(AbsentError, match="is empty"):
        SecretStr({"file": str(path)})


def test_it_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """No way of printing, formatting, logging or encoding shows it."""
    secret = SecretStr(SECRET)
    config = decode_config(RemoteConfig, {"password": SECRET}, where="x")
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").info("%s %r %s", secret, secret, config)
    texts = [
        str(secret),
        repr(secret),
        f"{secret}",
        f"{secret:>40}",
        f"{secret!r}",
        "".join(map(str, [secret])),
        caplog.text,
    ]
    texts += [
        repr(config),
        str(config),
        str([secret]),
        json.dumps(encode_config(config)),
        str(msgspec.structs.asdict(config)),
    ]
    for text in texts:
        assert SECRET not in text
    assert encode_config(config)["password"] == "***"
    for encode in (msgspec.json.encode, msgspec.msgpack.encode, msgspec.to_builtins, json.dumps):
        with pytest.raises(TypeError) as caught:
            encode(secret)
        assert SECRET not in str(caught.value)


def test_it_is_a_value() -> None:
    """Secrets compare by value, only with other secrets, and can be copied."""
    assert SecretStr("a") == SecretStr("a") != SecretStr("b")
    assert SecretStr("a") != "a"
    assert len({SecretStr("a"), SecretStr(SecretStr("a"))}) == 1
    assert copy.deepcopy(SecretStr("a")) == SecretStr("a")


@pytest.mark.parametrize(
    "value",
    [
        {"password": ["hunter2-correct-horse"]},
        {"password": {"enw": SECRET}},
        {"password": {"env": SECRET}},
        {"password": {"env": "X", "file": SECRET}},
        {"password": {"file": 5, "x": SECRET}},
        {"password": 5, "x": SECRET},
        {"password": True, "passwort": SECRET},
        {"port": {"password": SECRET}},
        {"port": f"redis://user:{SECRET}@host:6379/0"},
        {"port": f"redis://user:pa/ss{SECRET}@host"},
        {"port": f":{SECRET}@host:6379"},
        {"port": f"https://host/path?X-Amz-Signature={SECRET}&x=1"},
        {"port": [f"https://{SECRET}@host"]},
        {"access_key_id": SECRET},
        {"headers": {"Authorization": [SECRET]}},
        {"headers": [SECRET]},
        {"url": [SECRET]},
        {"io": {"a": SECRET}},
        json.dumps({"password": SECRET})[:-1],
        json.dumps({"password": SECRET}).replace(":", "="),
        json.dumps([SECRET]),
        SECRET,
        f'{{"password": "{SECRET}", "password": "{SECRET}"}}',
        f'{{"password": "{SECRET}", "port": NaN}}',
        f'{{"password": "{SECRET}"'.encode() + b"\xff}",
    ],
    ids=str,
)
def test_no_error_shows_it(value: Any) -> None:
    """For any configuration mistake, neither the error nor its printed traceback shows a secret."""
    with pytest.raises(ConfigError) as caught:
        decode_config(RemoteConfig, value, where="remote tier")
    # The source lines in a traceback are those of this file, not the value.
    text = "".join(traceback.format_exception_only(caught.value)) + repr(caught.value)
    assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)
    assert SECRET not in text
    assert "remote tier" in text


def test_missing_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source without a value is named, so that it can be corrected."""
    monkeypatch.delenv("KV_TEST_SECRET", raising=False)
    with pytest.raises(ConfigError, match="'KV_TEST_SECRET' is not set"):
        SecretStr({"env": "KV_TEST_SECRET"})
    monkeypatch.setenv("KV_TEST_SECRET", "")
    with pytest.raises(ConfigError, match="empty"):
        SecretStr({"env": "KV_TEST_SECRET"})
    with pytest.raises(ConfigError, match=r"nothing.*can't be read: No such file"):
        SecretStr({"file": str(tmp_path / "nothing")})
    with pytest.raises(ConfigError, match="can't be read"):
        SecretStr({"file": "a\0b"})
    with pytest.raises(ConfigError, match="empty"):
        SecretStr("")


def test_bad_files(tmp_path: Path) -> None:
    """A directory, a FIFO (which must not hang), a huge file and binary content are refused."""
    fifo, huge, binary = tmp_path / "fifo", tmp_path / "huge", tmp_path / "binary"
    os.mkfifo(fifo)
    huge.write_bytes(b"x" * 70_000)
    binary.write_bytes(SECRET.encode() + b"\xff")
    for path, reason in [(fifo, "regular"), (huge, "regular"), (binary, "UTF-8"), (tmp_path, "regular|directory")]:
        with pytest.raises(ConfigError, match=reason) as caught:
            SecretStr({"file": str(path)})
        assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (None, "", "null"),
        (True, "", "true"),
        (5, "", "5"),
        (1.5, "", "1.5"),
        ("x", "", "'x'"),
        ({}, "", "a JSON object"),
        ([], "", "a list"),
        (10**100, "", "a huge number"),
        (float("nan"), "", "nan"),
        (object(), "", "a value of type object"),
        ("x" * 100, "", "'" + "x" * 79 + "…"),
        ("a b", "secret_key", "(not shown)"),
        ("a b", "auth_token", "(not shown)"),
        (SecretStr("x"), "", "(not shown)"),
        ("s3://bucket/a", "", "'s3://bucket/a'"),
        ("redis://u:p@host:1/0", "", "'redis://***@host:1/0'"),
    ],
)
def test_shown(value: object, name: str, text: str) -> None:
    """A value is shown recognizably, unless it may be secret."""
    assert shown(value, name) == text
