"""``kvstore s3-lifecycle`` prints rules that a service accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.s3 import S3Config
from kvstore.cli.lifecycle import lifecycle_command, lifecycle_rules
from kvstore.errors import ConfigError
from tests.s3.servers import S3Server

TIER = "s3://kv-cache/kv?ttl=30d"


def printed(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    """Return the command's output."""
    lifecycle_command(TIER, prefix_is_ours=True, **options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_rules_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The rules are those of the library for the tier's options."""
    assert printed(capsys) == lifecycle_rules(S3Config(bucket="kv-cache", ttl="30d"), prefix_is_ours=True)


def test_rules_of_others_stay(capsys: pytest.CaptureFixture[str], tmp_path: Path, moto_server: S3Server) -> None:
    """Merged with a bucket's rules, others' rules stay and ours are there once; the service accepts the result."""
    foreign = {"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 9}}
    file = tmp_path / "rules.json"
    file.write_text(
        json.dumps({"Rules": [foreign, *lifecycle_rules(S3Config(bucket="kv-cache"), prefix_is_ours=True)["Rules"]]})
    )
    rules = printed(capsys, merge=file)
    assert rules["Rules"] == [foreign, *printed(capsys)["Rules"]]
    admin = moto_server.admin()
    admin.create_bucket(Bucket="lifecycle-command")
    admin.put_bucket_lifecycle_configuration(Bucket="lifecycle-command", LifecycleConfiguration=rules)
    file.write_text(json.dumps(admin.get_bucket_lifecycle_configuration(Bucket="lifecycle-command"), default=str))
    admin.close()
    assert [rule["ID"] for rule in printed(capsys, merge=file)["Rules"]] == [rule["ID"] for rule in rules["Rules"]]


def test_a_bucket_without_rules_prints_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An empty file, as a bucket without rules gives, counts as no rules."""
    (tmp_path / "none").write_text("")
    assert printed(capsys, merge=tmp_path / "none") == printed(capsys)


@pytest.mark.parametrize(
    ("text", "expected"), [("{", "is not valid JSON"), ("[]", "has no 'Rules'"), ('{"Rules": [1]}', "has no 'Rules'")]
)
def test_other_files_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    """A file that is not a list of rules is refused, so that no rule is lost."""
    (tmp_path / "rules").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        lifecycle_command(TIER, tmp_path / "rules")
    with pytest.raises(ConfigError, match="can't be read"):
        lifecycle_command(TIER, tmp_path / "nothing")


def test_other_tiers_are_refused() -> None:
    """Only S3 has lifecycle rules."""
    with pytest.raises(ConfigError, match="is not an S3 tier"):
        lifecycle_command("memory")


def test_rules_expire_no_foreign_objects_under_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a statement that the prefix is ours alone, rules cover our notes only, or are refused."""
    lifecycle_command("s3://kv-cache/kv")
    rules = json.loads(capsys.readouterr().out)["Rules"]
    assert [rule["Filter"]["Prefix"] for rule in rules] == ["kv/_keeper/removed/"]
    with pytest.raises(ConfigError, match="--prefix-is-ours"):
        lifecycle_command(TIER)


@pytest.mark.parametrize("ours", [False, True])
def test_a_tier_without_a_prefix_has_no_rules(ours: bool) -> None:
    """Rules for the whole bucket are refused, whatever the statement."""
    with pytest.raises(ConfigError, match="no prefix"):
        lifecycle_command('{"type": "s3", "bucket": "kv-cache", "prefix": "", "ttl": "30d"}', prefix_is_ours=ours)


def test_a_tier_within_the_prefix_is_seen(tmp_path: Path) -> None:
    """If the bucket has rules of another tier under this prefix, the prefix is not ours alone."""
    inner = lifecycle_rules(S3Config(bucket="kv-cache", prefix="kv/team/"), prefix_is_ours=False)
    (tmp_path / "rules").write_text(json.dumps(inner))
    with pytest.raises(ConfigError, match="another tier under 'kv/'"):
        lifecycle_command(TIER, tmp_path / "rules", prefix_is_ours=True)
