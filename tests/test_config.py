"""Configuration: decoding, and the errors for invalid values."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.config import (
    ByteSize,
    Capacity,
    Seconds,
    SecretStr,
    TierConfig,
    check_field,
    decode_config,
    encode_config,
    nearest_name,
)
from kvstore.errors import ConfigError, KVStoreError


class RetryConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A part of a configuration."""

    tries: int = 3
    pause: Seconds = Seconds(1)
    pauses: list[int] = msgspec.field(default_factory=list)


class DiskConfig(TierConfig, kw_only=True, frozen=True):
    """A backend's configuration, with every kind of option."""

    aliases: ClassVar[dict[str, str]] = {"root_dir": "path", "max_bytes": "capacity"}

    path: str
    capacity: Capacity | None = None
    mode: Literal["none", "data", "full"] = "none"
    share: float = 0.5
    password: SecretStr | None = None
    directory: Path | None = None
    retry: RetryConfig | None = None

    def __post_init__(self) -> None:
        """Check the subclass's fields after those of the base."""
        super().__post_init__()
        check_field(0 < self.share <= 1, "share", self.share, "above 0 and at most 1")


class MirrorConfig(DiskConfig, kw_only=True, frozen=True):
    """A subclass's configuration, with an additional alias."""

    aliases: ClassVar[dict[str, str]] = {"second": "mirror"}

    mirror: str = ""


def decode(value: Any) -> DiskConfig:
    """Decode a disk tier."""
    return decode_config(DiskConfig, value, where="disk tier")


def test_defaults() -> None:
    """Without any key a tier has the documented defaults, of the right types."""
    config = decode_config(TierConfig, {}, where="tier")
    assert encode_config(config) == {
        "namespace": "",
        "codec": "raw",
        "io": "auto",
        "load_timeout": 5.0,
        "store_timeout": 30.0,
        "lookup_timeout": 1.0,
        "bytes_per_second_min": 50 * 1024**2,
        "inflight_bytes": 1024**3,
        "store_backlog_bytes": 2 * 1024**3,
        "positive_ttl": 60.0,
        "negative_ttl": 5.0,
        "breaker_failures": 5,
        "breaker_cooldown": 1.0,
        "breaker_cooldown_max": 30.0,
        "required": True,
        "reset": "forget",
        "epoch": None,
        "label": "",
    }
    assert config == TierConfig()
    assert isinstance(config.load_timeout, Seconds)
    assert isinstance(config.inflight_bytes, ByteSize)


FULL = {
    "root_dir": "/mnt/kv",
    "max_bytes": "80%",
    "mode": "data",
    "share": 1,
    "password": "secret",
    "directory": "/tmp",
    "retry": {"tries": 5, "pause": "250ms"},
    "load_timeout": "2s",
    "store_timeout": 7,
    "inflight_bytes": "256MiB",
    "positive_ttl": 0,
    "label": "nvme-0",
    "namespace": "mine",
}


def test_everything_that_can_be_written() -> None:
    """Aliases, text forms and parts are decoded."""
    config = decode(FULL)
    assert (config.path, config.capacity, config.mode) == ("/mnt/kv", Capacity("80%"), "data")
    assert (config.share, config.directory, config.label) == (1.0, Path("/tmp"), "nvme-0")
    assert config.retry == RetryConfig(tries=5, pause=Seconds("250ms"))
    assert (config.load_timeout, config.store_timeout, config.positive_ttl) == (2.0, 7.0, 0.0)
    assert config.inflight_bytes == 256 * 1024**2
    assert config.password == SecretStr("secret")


def test_text_forms_in_python() -> None:
    """A configuration made in Python accepts the same strings, and checks the same ranges."""
    made: Any = DiskConfig(path="/x", capacity="1GiB", load_timeout="250ms", inflight_bytes="1MiB", password="p")  # type: ignore[arg-type]
    assert (made.capacity, made.load_timeout, made.inflight_bytes) == (Capacity(1024**3), 0.25, 1024**2)
    assert isinstance(made.load_timeout, Seconds)
    with pytest.raises(ConfigError, match="'load_timeout' is 0"):
        DiskConfig(path="/x", load_timeout=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a valid duration"):
        DiskConfig(path="/x", load_timeout="soon")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        made.path = "/y"


def test_encoded_configuration_decodes() -> None:
    """The encoded form of a configuration (without secrets) is a configuration again."""
    config = decode(FULL | {"password": None})
    assert decode(json.loads(json.dumps(encode_config(config)))) == config


def test_aliases_are_inherited() -> None:
    """A subclass keeps the aliases of its bases."""
    config = decode_config(MirrorConfig, {"root_dir": "/a", "second": "/b"}, where="mirror tier")
    assert (config.path, config.mirror) == ("/a", "/b")


REFUSED: list[tuple[Any, list[str]]] = [
    ({}, ["The disk tier needs 'path'."]),
    ({"path": "x", "capcity": 1}, ["Unknown key 'capcity' in disk tier.", "Did you mean 'capacity'? Known: "]),
    ({"path": "x", "Capacity": 1}, ["Unknown key 'Capacity'", "Did you mean 'capacity'?"]),
    ({"path": "x", "max_byte": 1}, ["Did you mean 'max_bytes'?"]),
    ({"path": "x", "load_timout": 1}, ["Did you mean 'load_timeout'?"]),
    ({"path": "x", "": 1}, ["Unknown key ''"]),
    ({"path": "x", 3: 1}, ["Unknown key 3 in disk tier."]),
    ({"path": "x", "aliases": {}}, ["Unknown key 'aliases'"]),
    ({"path": "x", "root_dir": "y"}, ["'path', 'root_dir' in the disk tier mean the same. Give one of them."]),
    ({"root_dir": "y", "path": "x"}, ["'root_dir', 'path' in the disk tier mean the same."]),
    ({"path": 5}, ["disk tier: 'path' is 5.", "Expected text."]),
    ({"root_dir": 5}, ["'path' is 5"]),
    ({"path": None}, ["'path' is null"]),
    ({"path": ["/a", "/b"]}, ["'path' is a list", "Expected text."]),
    ({"path": "x", "mode": "date"}, ["'mode' is 'date'.", "Expected one of 'none', 'data', 'full'."]),
    ({"path": "x", "mode": 1}, ["'mode' is 1.", "Expected text"]),
    ({"path": "x", "io": "fork"}, ["'io' is 'fork'.", "'thread', 'process'"]),
    ({"path": "x", "capacity": "lots"}, ["'capacity'", "'lots' is not a valid size", "'512MiB'", "'80%'"]),
    ({"path": "x", "capacity": "120%"}, ["'120%' is not a valid share", "at most 100%"]),
    ({"path": "x", "capacity": -1}, ["'capacity'", "-1 is not a valid size"]),
    ({"path": "x", "inflight_bytes": "5G"}, ["'inflight_bytes'", "'5G' is not a valid size", "GiB"]),
    ({"path": "x", "inflight_bytes": None}, ["'inflight_bytes'", "null is not a valid size"]),
    ({"path": "x", "inflight_bytes": 0}, ["'inflight_bytes' is 0", "at least 1 byte"]),
    ({"path": "x", "load_timeout": "5 sec"}, ["'load_timeout'", "'5 sec' is not a valid duration", "'250ms'"]),
    ({"path": "x", "load_timeout": 0}, ["'load_timeout' is 0", "above 0 and at most one day"]),
    ({"path": "x", "store_timeout": "2d"}, ["'store_timeout' is 172800", "at most one day"]),
    ({"path": "x", "lookup_timeout": -1}, ["'lookup_timeout'", "-1 is not a valid duration"]),
    ({"path": "x", "positive_ttl": True}, ["'positive_ttl'", "true is not a valid duration"]),
    ({"path": "x", "breaker_failures": 0}, ["'breaker_failures' is 0", "1 to 1000000"]),
    ({"path": "x", "breaker_failures": 1.5}, ["'breaker_failures' is 1.5", "Expected a whole number."]),
    ({"path": "x", "breaker_failures": True}, ["'breaker_failures' is true", "Expected a whole number."]),
    ({"path": "x", "breaker_cooldown": "2m"}, ["'breaker_cooldown_max' is 30", "at least breaker_cooldown (120.0 s)"]),
    ({"path": "x", "required": "yes"}, ["'required' is 'yes'", "Expected true or false."]),
    ({"path": "x", "label": "a b"}, ["'label' is 'a b'", "at most 64 letters"]),
    ({"path": "x", "label": "a" * 65}, ["'label' is 'aaa"]),
    ({"path": "x", "namespace": "n" * 1025}, ["'namespace' is 'nnn", "at most 1024 characters"]),
    ({"path": "x", "share": 2}, ["'share' is 2.0", "above 0 and at most 1"]),
    ({"path": "x", "share": "half"}, ["'share' is 'half'", "Expected a number."]),
    ({"path": "x", "directory": 5}, ["'directory'", "5 can't become Path"]),
    (
        {"path": "x", "retry": {"trys": 1}},
        ["Unknown key 'trys' in disk tier, 'retry'. Did you mean 'tries'? Known: pause, pauses, tries."],
    ),
    ({"path": "x", "retry": {"tries": "1"}}, ["'retry.tries' is '1'", "Expected a whole number."]),
    ({"path": "x", "retry": {"pause": "x"}}, ["'retry.pause'", "'x' is not a valid duration"]),
    ({"path": "x", "retry": {"pauses": [1, "x"]}}, ["disk tier: 'retry.pauses[1]' is 'x'"]),
    ({"path": "x", "retry": 7}, ["'retry' is 7. Expected a JSON object or null."]),
    ([], ["The configuration of the disk tier is a list. Expected a JSON object."]),
    (None, ["The configuration of the disk tier is null."]),
    (5, ["The configuration of the disk tier is 5."]),
    ("{}", ["The configuration of the disk tier is text. Expected a JSON object."]),
    ({"path": "x", "share": math.nan}, ["'share' is nan", "above 0 and at most 1"]),
    ({"path": "x", "share": math.inf}, ["'share' is inf", "above 0 and at most 1"]),
]


@pytest.mark.parametrize(("value", "parts"), REFUSED, ids=[" ".join(parts)[:60] for _, parts in REFUSED])
def test_refusals(value: Any, parts: list[str]) -> None:
    """A bad configuration is one clear error: the value, the expected form, the solution."""
    with pytest.raises(ConfigError) as caught:
        decode(value)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, KVStoreError)
    assert isinstance(caught.value, ValueError)


def test_two_missing_keys() -> None:
    """All missing keys are listed at once."""

    class Pair(msgspec.Struct):
        left: str
        right: str

    with pytest.raises(ConfigError, match=r"^The pair needs 'left', 'right'\.$"):
        decode_config(Pair, {}, where="pair")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["path", "root_dir", *DiskConfig.__struct_fields__]) | st.text(max_size=10)


@settings(deadline=None, max_examples=400)
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_nothing_but_a_config_error(value: dict[str, Any]) -> None:
    """Any JSON object is a configuration or a ConfigError."""
    with contextlib.suppress(ConfigError):
        decode({"path": "x"} | value)


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("nvmee", ["file", "nvme"], "nvme"),
        ("NVMe", ["file", "nvme"], "nvme"),
        ("capcity", ["Capacity", "path"], "Capacity"),
        ("zebra", ["file", "nvme"], None),
        ("secret_key", ["sse_bucket_key", "secret_access_key", "secret"], "secret_access_key"),
        ("", ["file"], None),
        ("file", [], None),
        ("f" * 100_000, ["file"], None),
    ],
)
def test_nearest_name(name: str, known: list[str], nearest: str | None) -> None:
    """The nearest name is returned if one is similar enough."""
    assert nearest_name(name, known) == nearest
