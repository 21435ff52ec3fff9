"""``kvstore s3-lifecycle``: the lifecycle rules that a bucket should have."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.names import KeeperNames
from kvstore.cli.command_line import Option, TierOption, parsed_json, text_of
from kvstore.cli.interruption import DEADLINE_TO_LOOK, Deadline, DeadlineOption
from kvstore.cli.terminal import print_json_text
from kvstore.cli.tier_argument import parse_tier
from kvstore.errors import ConfigError

_DAY_S: Final = 86400.0
_NOTES_DAYS: Final = 2
"""Age at which removal notices are deleted. They are needed for one day; an evicting engine deletes them earlier."""

_ID: Final = "kvstore"
_ID_CHARS_MAX: Final = 255

_Merge = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="Rules of the bucket to keep, as printed by 'aws s3api get-bucket-lifecycle-configuration'.",
    ),
]
_Ours = Annotated[
    bool,
    Option(
        "--prefix-is-ours",
        help="Confirm that the prefix contains this tier only. The rules may delete all objects below it.",
    ),
]


def lifecycle_command(
    tier: TierOption, merge: _Merge = None, prefix_is_ours: _Ours = False, deadline: DeadlineOption = DEADLINE_TO_LOOK
) -> None:
    """Print the lifecycle rules for an S3 tier's bucket. Nothing is sent to the service.

    A service knows objects by the beginning of their names, not by who wrote them. Without --prefix-is-ours the rules
    concern only notes between engines.

    A bucket has one list of rules, and putting one replaces all: give those it has by --merge, and put what this
    prints by 'aws s3api put-bucket-lifecycle-configuration --bucket NAME --lifecycle-configuration file://FILE'.
    """
    with Deadline(deadline):
        config = parse_tier(tier).config
        if not isinstance(config, S3Config):
            raise ConfigError("--tier is not an S3 tier. Expected one such as 's3://bucket/prefix?ttl=30d'.")
        existing = [] if merge is None else _rules_in(merge)
        rules = merged_rules(existing, config, prefix_is_ours=prefix_is_ours)
    print_json_text(json_module.dumps(rules, indent=2))


def _rules_in(path: Path) -> list[dict[str, Any]]:
    text = text_of(f"@{path}", "--merge")
    found = parsed_json(text, f"--merge {path}", " Give what the service returned.") if text.strip() else {"Rules": []}
    rules = found.get("Rules") if isinstance(found, dict) else None
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise ConfigError(f"--merge {path} has no 'Rules'. Give what get-bucket-lifecycle-configuration returned.")
    return rules


def lifecycle_rules(config: S3Config, *, prefix_is_ours: bool) -> dict[str, Any]:
    """Return the rules for a tier's prefix, in the format of ``PutBucketLifecycleConfiguration``.

    They delete old notices between engines. If the prefix belongs to the tier alone, they also delete old versions of
    deleted blocks in a versioned bucket and, with a ``ttl``, blocks of that age. A service counts whole days since an
    object was written, regardless of its use, so the ``ttl`` is rounded up to days.

    Raises:
        ConfigError: The rules would affect objects of others.
    """
    prefix = config.prefix
    if not prefix:
        raise ConfigError("The tier has no prefix: its rules would concern the whole bucket. Give it a 'prefix'.")
    if config.ttl and not prefix_is_ours:
        raise ConfigError(
            f"A rule for 'ttl' deletes whatever lies under {prefix!r}, not only blocks of this tier. "
            "Give --prefix-is-ours if nothing else does, or leave out 'ttl'."
        )
    rules = [_rule(prefix, "notes", KeeperNames(prefix).notes, Expiration={"Days": _NOTES_DAYS})]
    if prefix_is_ours:
        noncurrent, markers = {"NoncurrentDays": 1}, {"ExpiredObjectDeleteMarker": True}
        rules.append(_rule(prefix, "versions", prefix, NoncurrentVersionExpiration=noncurrent, Expiration=markers))
    if config.ttl:
        rules.append(_rule(prefix, "ttl", prefix, Expiration={"Days": math.ceil(config.ttl / _DAY_S)}))
    return {"Rules": rules}


def merged_rules(existing: Sequence[Mapping[str, Any]], config: S3Config, *, prefix_is_ours: bool) -> dict[str, Any]:
    """Return a bucket's rules with those of this tier replaced by :func:`lifecycle_rules`.

    Raises:
        ConfigError: The rules would affect objects of others, such as those of a tier whose prefix begins with this
            tier's.
    """
    start = _rule_id(config.prefix, "")
    others = [dict(rule) for rule in existing if not str(rule.get("ID", "")).startswith(start)]
    inner = [str(rule["ID"]) for rule in others if str(rule.get("ID", "")).startswith(f"{_ID}:{config.prefix}")]
    if inner and prefix_is_ours:
        raise ConfigError(f"Rule {inner[0]!r} is of another tier under {config.prefix!r}. Leave out --prefix-is-ours.")
    return {"Rules": [*others, *lifecycle_rules(config, prefix_is_ours=prefix_is_ours)["Rules"]]}


def _rule(prefix: str, name: str, scope: str, **actions: Any) -> dict[str, Any]:
    return {"ID": _rule_id(prefix, name), "Status": "Enabled", "Filter": {"Prefix": scope}, **actions}


def _rule_id(prefix: str, name: str) -> str:
    return f"{_ID}:{prefix[-(_ID_CHARS_MAX - 32) :]}:{name}"
