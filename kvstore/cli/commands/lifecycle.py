"""``kvstore s3-lifecycle``: the lifecycle rules that a bucket should have."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any, Final

from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.lifecycle import lifecycle_rules, merged_rules
from kvstore.cli.command_line import Option, Typer
from kvstore.cli.deadline import DEADLINE_TO_LOOK, Deadline, DeadlineOption
from kvstore.cli.reporting.terminal import print_json_text
from kvstore.cli.tier_argument import parse_tier
from kvstore.errors import ConfigError

__all__ = ["add_commands"]

_FILE_BYTES_MAX: Final = 1 << 20
"""A bucket has at most a thousand rules."""

_Tier = Annotated[str, Option("--tier", "-t", metavar="JSON|URL|@FILE", help="The S3 tier.")]
_Merge = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="Rules that the bucket has, as 'aws s3api get-bucket-lifecycle-configuration' prints them: they stay.",
    ),
]


def add_commands(app: Typer) -> None:
    """Add the command."""
    app.command("s3-lifecycle")(lifecycle_command)


def lifecycle_command(tier: _Tier, merge: _Merge = None, deadline: DeadlineOption = DEADLINE_TO_LOOK) -> None:
    """Print the lifecycle rules for an S3 tier's bucket. Nothing is sent to the service.

    A bucket has one list of rules, and putting one replaces all: give those it has by --merge, and put what this
    prints by 'aws s3api put-bucket-lifecycle-configuration --bucket NAME --lifecycle-configuration file://FILE'.
    """
    with Deadline(deadline):
        config = parse_tier(tier).config
        if not isinstance(config, S3Config):
            raise ConfigError("--tier is no S3 tier. Give one such as 's3://bucket/prefix?ttl=30d'.")
        rules = lifecycle_rules(config) if merge is None else merged_rules(_rules_in(merge), config)
    print_json_text(json_module.dumps(rules, indent=2))


def _rules_in(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        found = json_module.loads(data) if data.strip() else {"Rules": []}
    except OSError as error:
        raise ConfigError(f"--merge {path} can't be read: {error.strerror}. Give a file that exists.") from error
    except ValueError as error:
        raise ConfigError(f"--merge {path} is no JSON: {error}. Give what the service returned.") from None
    rules = found.get("Rules") if isinstance(found, dict) else None
    if len(data) > _FILE_BYTES_MAX or not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise ConfigError(f"--merge {path} has no 'Rules'. Give what get-bucket-lifecycle-configuration returned.")
    return rules
