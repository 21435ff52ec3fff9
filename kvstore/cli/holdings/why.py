"""``kvstore why``: where the blocks of a prompt lie, under which namespaces, and how these differ."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from typing import Annotated, Any, Final, NoReturn

from kvstore.cli.command_line import Argument, Exit, ExitCode, JsonFlag, Option, parsed_json, text_of, vllm_module
from kvstore.cli.holdings.care import chosen
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.interruption import Deadline, DeadlineError, DeadlineOption
from kvstore.cli.terminal import Column, print_json_text, print_table, say
from kvstore.cli.tier_argument import parse_medium
from kvstore.config import TierConfig
from kvstore.errors import ConfigError, KVStoreError
from kvstore.namespace import Namespace
from kvstore.registry import BACKENDS
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.opening import namespace_of_tier
from kvstore.types import BlockKey, NamespaceInfo

_SCHEMA: Final = 1

_DEADLINE: Final = "10min"
"""Default deadline: with tenants, every key of a namespace is listed."""

_DIGITS: Final = 12
"""Digits of a namespace in texts."""

_OF_ENGINES: Final = frozenset({"secondary_tiers", "connectors", "kv_connector", "kv_connector_extra_config"})
"""Keys in the configuration of an engine that no tier has."""

_SHOWN_MAX: Final = 3
"""Most changed fields in a table; ``--json`` has all."""

_VALUE_CHARS_MAX: Final = 40

_DETAILS: Final = ("engine_config.settings.", "environment.")
"""Starts of the fields shown last: a change of vLLM's version or of a model may change many of them."""

_OF_TIERS: Final = frozenset({"codecs", "epoch", "user_namespace"})
"""Fields that differ between the tiers of one engine."""

_HINT: Final = (
    "Why a block was not stored, or has left, is known to the engine that computed it: see 'kvstore top', its "
    'vllm:kvstore_missed_blocks, or a request with {"kvstore": {"explain": true}} in its kv_transfer_params.'
)

_COLUMNS: Final = (
    Column("tier", "tier", left=True, style="bold"),
    Column("short", "namespace", left=True),
    Column("share", "blocks"),
    Column("tokens", "tokens"),
    Column("difference", "difference", left=True, folds=True),
)


def why_command(
    prompt: Annotated[
        str, Argument(metavar="PROMPT|TOKENS|@FILE", help="The prompt, or its token ids: '[1, 2, 3]'; @- reads stdin.")
    ],
    engine: Annotated[
        str,
        Option(
            metavar="JSON|@FILE",
            help="The engine's --kv-transfer-config, or its secondary_tiers, or one tier (also as a URL).",
        ),
    ],
    namespace: Annotated[
        str | None,
        Option(
            "--namespace", "-n", metavar="HEX",
            help="The engine's namespace, from its log, or the start of it. Default: the one used last.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, Option(metavar="NAME|DIR", help="The model's tokenizer. Default: that of the namespace's model.")
    ] = None,
    cache_salt: Annotated[str | None, Option(metavar="TEXT", help="The request's cache_salt.")] = None,
    deadline: DeadlineOption = _DEADLINE,
    json: JsonFlag = False,
) -> None:  # fmt: skip
    """Show on which tiers the blocks of a prompt are.

    Under the engine's namespace and under all others. Changes nothing. Run it in the engine's environment, because it
    imports vLLM; it needs no device.
    """
    text = text_of(prompt, "prompt")
    tiers = _tiers_of(engine, vllm_module("options"))
    prompts = vllm_module("prompts")
    with Deadline(deadline), ExitStack() as opened:
        media, failures = _opened(tiers, opened)
        known = _merged(each for _, there in media for each in there)
        if failures and not known:
            _fail(failures)
        own = _own_of(known, namespace)
        tokens = _tokens_in(text)
        if tokens is None:
            tokens = prompts.tokens_of(text, tokenizer or _model_of(own))
        rows = []
        for medium, there in media:
            described = [known[each.hex] for each in there if each.hex in known]
            ours = _own_in(described, own, medium.tier.config)
            for each in {each.hex: each for each in (ours, *described)}.values():
                try:
                    keys = prompts.keys_of(tokens, each.fields or own.fields, cache_salt)
                    rows.append(_row(medium, each, keys, ours))
                except DeadlineError:
                    raise
                # It concerns this namespace on this tier only.
                except (KVStoreError, OSError) as error:
                    failures[f"{medium.tier.name}, namespace {each.hex[:_DIGITS]}"] = str(error)
    if json:
        report = {"schema": _SCHEMA, "command": "why", "namespace": _base_of(own).hex, "tokens": len(tokens)}
        print_json_text(json_module.dumps(report | {"rows": rows, "failures": failures}, indent=1, ensure_ascii=False))
    else:
        _print(rows, own, len(tokens), prompts.name_of)
    if failures:
        _fail(failures)
    if not json and all(row["blocks"] < row["of"] for row in rows if row["is_own"]):
        say(_HINT)


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the fields in which two namespaces differ, with both values; None for a missing one.

    Their names have dots between those of nested objects.
    """
    ours, theirs = _flat(own), _flat(other)
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name, ...) != theirs.get(name, ...))
    return {name: [ours.get(name), theirs.get(name)] for name in names}


def _fail(failures: Mapping[str, str]) -> NoReturn:
    for name, failure in failures.items():
        say(f"{name}: {failure}")
    raise Exit(ExitCode.FAILED)


def _tiers_of(text: str, options: ModuleType) -> list[tuple[str, str]]:
    """Return the tiers of an engine except vLLM's own: the name of each, as in metrics, and its text.

    ``options``: :mod:`kvstore.vllm.options`.
    """
    text = text_of(text, "configuration").strip()
    value = parsed_json(text, "The configuration") if text.startswith(("{", "[")) else None
    if value is None or (isinstance(value, dict) and not value.keys() & _OF_ENGINES):
        return [(parse_medium(text).name, text)]
    tiers = options.with_short_types({"secondary_tiers": _secondary_tiers(value)})["secondary_tiers"]
    return [(options.tier_name(tier), json_module.dumps(tier)) for tier in tiers if tier["type"] == options.TIER_TYPE]


def _secondary_tiers(value: Any) -> Any:
    """Return the list of tiers in a configuration, such as that of a connector, or of several in one."""
    if isinstance(value, list):
        return value
    extra = value.get("kv_connector_extra_config", value)
    connectors = extra.get("connectors") if isinstance(extra, dict) else None
    for each in [extra, *(connectors if isinstance(connectors, list) else ())]:
        inner = each.get("kv_connector_extra_config", each) if isinstance(each, dict) else {}
        if isinstance(inner, dict) and "secondary_tiers" in inner:
            return inner["secondary_tiers"]
    raise ConfigError("The configuration has no 'secondary_tiers'. Expected the tiers of an engine with kvstore.")


def _opened(
    tiers: Sequence[tuple[str, str]], media: ExitStack
) -> tuple[list[tuple[Medium, list[NamespaceInfo]]], dict[str, str]]:
    """Return the media of tiers with their namespaces, and the failures by the tier's name."""
    found, failures = [], {}
    for name, text in tiers:
        try:
            tier = parse_medium(text)
            if BACKENDS.find(tier.backend).takes_stores:
                medium = media.enter_context(Medium(tier))
                found.append((medium, medium.described()))
        except DeadlineError:
            raise
        # Also a secret that this machine lacks.
        except (KVStoreError, OSError) as error:
            failures[name] = str(error)
    return found, failures


def _merged(namespaces: Iterable[NamespaceInfo]) -> dict[str, NamespaceInfo]:
    """Return vLLM's namespaces on all media by digest, each with its fields if any medium has them."""
    known: dict[str, NamespaceInfo] = {}
    for each in namespaces:
        if each.fields is not None and each.fields.get("engine") != "vllm":
            continue
        other = known.get(each.hex, each)
        known[each.hex] = replace(each, fields=each.fields or other.fields, used_at=max(each.used_at, other.used_at))
    return known


def _own_of(known: Mapping[str, NamespaceInfo], digits: str | None) -> NamespaceInfo:
    """Return the engine's namespace: the one whose digest begins with ``digits``, or the one used last."""
    if not known:
        raise ConfigError("The tiers have no namespaces of vLLM: no engine has stored anything there.")
    bases = [NamespaceInfo(_base_of(each).hex, each.fields, used_at=each.used_at) for each in known.values()]
    choices = {each.hex: each for each in (*bases, *known.values())}
    own = max(chosen(list(choices.values()), [digits] if digits else []), key=lambda each: each.used_at)
    if own.fields is None:
        raise ConfigError(
            f"The fields of namespace {own.hex[:16]} are not on any of the tiers. Engines of this version store them "
            "with their first block; an engine that starts now does so again."
        )
    return own


def _base_of(namespace: NamespaceInfo) -> Namespace:
    """Return a namespace without the fields of tiers, as the engine logs it."""
    if namespace.fields is None:
        return Namespace.of_digest(bytes.fromhex(namespace.hex))
    return Namespace({name: value for name, value in namespace.fields.items() if name not in _OF_TIERS})


def _own_in(there: Iterable[NamespaceInfo], own: NamespaceInfo, config: TierConfig) -> NamespaceInfo:
    """Return the engine's namespace on a tier, in the epoch used last.

    Args:
        there: The namespaces on the tier.
        own: The engine's namespace on any tier.
        config: The tier's.
    """
    expected = namespace_of_tier(_base_of(own), config)
    found = [
        each
        for each in there
        if each.fields is not None
        and Namespace({name: value for name, value in each.fields.items() if name != "epoch"}) == expected
    ]
    unused = NamespaceInfo(expected.hex, expected.document()["fields"])
    return max(found, key=lambda each: each.used_at, default=unused)


def _tokens_in(text: str) -> list[int] | None:
    """Return the token ids in a JSON list of integers; None for any other text, which is a prompt."""
    try:
        value = json_module.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and value and all(type(each) is int for each in value) else None


def _model_of(namespace: NamespaceInfo) -> str:
    if namespace.model is None:
        raise ConfigError("The namespace names no model. Name its tokenizer (--tokenizer).")
    return namespace.model


def _row(medium: Medium, namespace: NamespaceInfo, keys: Mapping[BlockKey, int], own: NamespaceInfo) -> dict[str, Any]:
    """Return how much of a prompt lies on a medium under a namespace; ``keys``: as from ``prompts.keys_of``."""
    there = _present(medium, namespace, own, keys)
    missing = min((end for key, end in keys.items() if key not in there), default=None)
    whole = (end for key, end in keys.items() if missing is None or end < missing)
    fields = namespace.fields
    return {
        "tier": medium.tier.name,
        "namespace": namespace.hex,
        "is_own": namespace.hex == own.hex,
        "blocks": len(there),
        "of": len(keys),
        "tokens": max(whole, default=0),
        "changes": None if fields is None else differences(own.fields or {}, fields),
    }


def _present(medium: Medium, namespace: NamespaceInfo, own: NamespaceInfo, keys: Collection[BlockKey]) -> set[BlockKey]:
    """Return which keys a medium has, under any tenant's tag."""
    if not keys:
        return set()
    digest = Namespace.of_digest(bytes.fromhex(namespace.hex))
    seal = TierCodecs(medium.tier.config.codec, digest).chain.seal
    names = None if seal is None else seal.names
    fields = namespace.fields or own.fields or {}
    if "tenants" not in str(fields.get("keys", "")):
        stored_as = {key if names is None else names.name_of(key): key for key in keys}
        return {stored_as[name] for name in medium.present(namespace, stored_as)}
    # The tag, at the start of a key, is unknown.
    length = len(next(iter(keys)))
    stored = (block.key if names is None else names.key_of(block.key) for block in medium.blocks(namespace))
    return {key[-length:] for key in stored if key is not None} & set(keys)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values within nested objects and lists by their names, with dots in between."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value}
    start = f"{name}." if name else ""
    return {inner: each for key, item in value.items() for inner, each in _flat(item, f"{start}{key}").items()}


def _print(
    rows: Sequence[dict[str, Any]], own: NamespaceInfo, tokens: int, name_of: Callable[[str], str | None]
) -> None:
    shown = [
        {
            "tier": row["tier"],
            "short": row["namespace"][:_DIGITS],
            "share": f"{row['blocks']} of {row['of']}",
            "tokens": row["tokens"],
            "difference": "the engine's" if row["is_own"] else _difference(row["changes"], name_of),
        }
        for row in sorted(rows, key=lambda row: (not row["is_own"], -row["blocks"]))
    ]
    print_table(shown, _COLUMNS, title=f"{tokens} tokens; namespace {_base_of(own).hex[:_DIGITS]}, model {own.model}")


def _difference(changes: Mapping[str, Sequence[Any]] | None, name_of: Callable[[str], str | None]) -> str:
    """Return the settings that differ, such as ``--dtype float16 (here bfloat16)``, or without any the fields."""
    if changes is None:
        return "its fields are unknown"
    settings: dict[str, Sequence[Any]] = {}
    for name in sorted(changes, key=lambda name: name.startswith(_DETAILS)):
        if (setting := name_of(name)) is not None:
            settings.setdefault(setting, changes[name])
    named = settings or dict(changes)
    texts = [f"{name} {_value(other)} (here {_value(own)})" for name, (own, other) in named.items()]
    more = [f"and {len(texts) - _SHOWN_MAX} more (--json)"] if len(texts) > _SHOWN_MAX else []
    return ", ".join(texts[:_SHOWN_MAX] + more)


def _value(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= _VALUE_CHARS_MAX else text[:_VALUE_CHARS_MAX] + "…"
