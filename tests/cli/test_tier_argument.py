"""Tiers as given on a command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvstore.cli.tier_argument import parse_tier
from kvstore.errors import ConfigError
from kvstore.primary import Region
from kvstore.runtime.process import ProcessSpec, find_backing
from kvstore.runtime.wire import Start


def test_json_of_vllm_is_taken_as_it_is() -> None:
    """An object of ``secondary_tiers`` can be pasted, including vLLM's own keys."""
    tier = parse_tier(
        '{"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "file", "path": "/kv", "capacity": "1GiB"}'
    )
    assert tier.backend == "file"
    assert tier.as_config() == {"backend": "file", "path": "/kv", "capacity": "1GiB"}
    assert tier.paths == [Path("/kv")]


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ('{"type": "file", "path": "/kv", "capacity": 5}', {"backend": "file", "path": "/kv", "capacity": 5}),
        ("file:///kv?capacity=1GiB", {"backend": "file", "path": "/kv", "capacity": "1GiB"}),
        ("nvme:///kv?capacity=1GiB&threads=4", {"backend": "nvme", "path": "/kv", "capacity": "1GiB", "threads": 4}),
        ("redis://h:1/2?ttl=1h", {"backend": "redis", "url": "redis://h:1/2", "ttl": "1h"}),
        ("unix:///s?db=3", {"backend": "redis", "url": "unix:///s?db=3"}),
        ("memory://", {"backend": "memory"}),
        ("memory", {"backend": "memory"}),
        ('[{"type": "memory"}]', {"backend": "memory"}),
    ],
)
def test_forms(text: str, config: dict[str, object]) -> None:
    """JSON, URLs and bare names mean the same configuration."""
    assert parse_tier(text).as_config() == config


def test_file_holds_any_form(tmp_path: Path) -> None:
    """``@FILE`` is replaced by the file's content."""
    path = tmp_path / "tier.json"
    path.write_text(json.dumps({"backend": "memory", "capacity": "1GiB"}))
    assert parse_tier(f"@{path}").as_config() == {"backend": "memory", "capacity": "1GiB"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a URL, and is not valid JSON"),
        ("17", "Expected a JSON object"),
        ("[]", "Expected a JSON object"),
        ("@/no/such/file", "can't be read"),
        ('{"path": "/kv"}', "names no backend"),
        ('{"type": "fiel", "path": "/kv"}', "Did you mean 'file'?"),
        ('{"type": "file", "path": "/kv", "capacty": 1}', "capacity"),
        ("ftp://host/kv", "Unknown backend 'ftp'"),
        ("file:///kv?capacity=1GiB&backend=s3", "its scheme names the backend"),
    ],
)
def test_refusals_give_a_remedy(text: str, said: str) -> None:
    """An unusable tier is refused with an explanation."""
    with pytest.raises(ConfigError) as caught:
        parse_tier(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "redis://user:hunter2@host:1/0",
        '{"type": "redis", "url": "redis://user:hunter2@host", "ttl": 5}',
        '{"type": "redis", "password": "hunter2"}',
    ],
)
def test_secrets_are_not_shown(text: str) -> None:
    """The displayed form of a tier has no password, wherever it was given."""
    tier = parse_tier(text)
    assert "hunter2" not in json.dumps(tier.shown())
    assert "hunter2" in json.dumps(tier.as_config())


@pytest.mark.parametrize(
    "text", ["redis://u:hunter2@host:1/0?ttl=x", '{"type": "redis", "password": "hunter2", "a": 1}']
)
def test_errors_hold_no_secret(text: str) -> None:
    """An error does not repeat a password."""
    with pytest.raises(ConfigError) as caught:
        parse_tier(text)
    assert "hunter2" not in str(caught.value)


def test_no_repr_shows_the_options() -> None:
    """No object that carries a tier's options shows them, because one may be a password."""
    argument = parse_tier('{"type": "redis", "url": "redis://127.0.0.1", "password": "CANARY"}')
    payload = {"options": argument.options}
    with Region.create(1, 4096) as region:
        backing = find_backing(region.view())
        assert backing is not None
        carriers = [argument, ProcessSpec("x:y", payload, backing, "tier"), Start("x:y", payload, 0, 0, 4096, [])]
        os.close(backing.fd)
    assert [repr(each).partition("(")[0] for each in carriers] == ["TierArgument", "ProcessSpec", "Start"]
    assert not any("CANARY" in repr(each) for each in carriers)
