"""Lifecycle rules for a bucket: what the service deletes by itself, when no engine runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstore.backends.s3.config import S3Config

__all__ = ["lifecycle_rules", "merged_rules"]

_DAY_S: Final = 86400.0
_NOTES_DAYS: Final = 2
"""Notes of removals are of use for a day; the engine that evicts deletes them, if there is one."""

_ID: Final = "kvstore"
_ID_CHARS_MAX: Final = 255


def lifecycle_rules(config: S3Config) -> dict[str, Any]:
    """Return the rules for a tier's prefix, as ``PutBucketLifecycleConfiguration`` takes them.

    They delete what a versioned bucket would keep of deleted blocks, old notes between engines, and, with a ``ttl``,
    blocks that were written so long ago. A service counts whole days from the writing and knows nothing of uses: the
    days are those of the ``ttl``, rounded up.

    Args:
        config: Of the tier.

    Returns:
        ``{"Rules": [...]}``.
    """
    prefix = config.prefix
    rules = [
        _rule(
            prefix,
            "versions",
            prefix,
            NoncurrentVersionExpiration={"NoncurrentDays": 1},
            Expiration={"ExpiredObjectDeleteMarker": True},
        ),
        _rule(prefix, "notes", f"{prefix}_keeper/removed/", Expiration={"Days": _NOTES_DAYS}),
    ]
    if config.ttl:
        rules.append(_rule(prefix, "ttl", prefix, Expiration={"Days": math.ceil(config.ttl / _DAY_S)}))
    return {"Rules": rules}


def merged_rules(existing: Sequence[Mapping[str, Any]], config: S3Config) -> dict[str, Any]:
    """Return a bucket's rules with ours in the place of those that were ours: a bucket has one list of rules.

    Args:
        existing: The bucket's rules, as ``GetBucketLifecycleConfiguration`` returns them.
        config: Of the tier.
    """
    start = _rule_id(config.prefix, "")
    others = [dict(rule) for rule in existing if not str(rule.get("ID", "")).startswith(start)]
    return {"Rules": [*others, *lifecycle_rules(config)["Rules"]]}


def _rule(prefix: str, name: str, scope: str, **actions: Any) -> dict[str, Any]:
    return {"ID": _rule_id(prefix, name), "Status": "Enabled", "Filter": {"Prefix": scope}, **actions}


def _rule_id(prefix: str, name: str) -> str:
    return f"{_ID}:{prefix[-(_ID_CHARS_MAX - 32) :]}:{name}"
