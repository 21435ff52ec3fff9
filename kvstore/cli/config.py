"""``kvstore config``: checks tiers and prints their JSON; with ``--vllm`` the whole ``--kv-transfer-config``."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from kvstore.cli.command_line import Option, json_object, size_option
from kvstore.cli.interruption import DEADLINE_TO_LOOK, Deadline, DeadlineOption
from kvstore.cli.terminal import print_json_text, say
from kvstore.cli.tier_argument import TierArgument, parse_tier
from kvstore.errors import AbsentError, ConfigError
from kvstore.eviction import make_policy
from kvstore.tiering.config import engine_tiering
from kvstore.tiers.preflight import check_before_opening, claim_paths, doubts_before_opening

Spec = Literal["kvstore", "tiering"]
"""Integration: kvstore's spec, or vLLM's own spec with kvstore's tiers."""

_MODULE: Final = "kvstore.vllm"
_TIER_TYPE: Final = "KVStoreTier"
_MASK: Final = "***"
_CPU_BYTES_LEAST: Final = 4096
"""A smaller size probably lacks its unit."""
_OURS: Final = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "manager",
        "cpu_bytes_to_use",
        "eviction_policy",
        "tiering",
        "secondary_tiers",
    }
)
"""Keys that this command sets."""

_Tiers = Annotated[
    list[str],
    Option("--tier", "-t", metavar="JSON|URL|@FILE", help="A tier; several, the fastest first."),
]
_Vllm = Annotated[bool, Option("--vllm", help="Print the value of vLLM's --kv-transfer-config, on one line.")]
_Spec = Annotated[
    str,
    Option(
        metavar="kvstore|tiering",
        help="kvstore: KVStoreOffloadingSpec. tiering: vLLM's own TieringOffloadingSpec with kvstore's tiers.",
    ),
]
_Cpu = Annotated[str, Option(metavar="SIZE", help="CPU memory of the primary tier.")]
_Manager = Annotated[str, Option(metavar="kvstore|vllm", help="Who manages the tiers, in kvstore's spec.")]
_Eviction = Annotated[str | None, Option(metavar="POLICY", help="Eviction policy of the primary tier.")]
_Tiering = Annotated[
    str | None,
    Option(metavar="JSON", help='Options of kvstore\'s manager, such as \'{"policy": {"min_uses": 2}}\'.'),
]
_Extra = Annotated[
    str | None, Option(metavar="JSON", help="More keys of vLLM's kv_connector_extra_config, such as block_size.")
]
_Pretty = Annotated[bool, Option("--pretty", help="Print it on several lines.")]


def config_command(
    tier: _Tiers,
    vllm: _Vllm = False,
    spec: _Spec = "kvstore",
    cpu: _Cpu = "8GiB",
    manager: _Manager = "kvstore",
    eviction: _Eviction = None,
    tiering: _Tiering = None,
    extra: _Extra = None,
    pretty: _Pretty = False,
    deadline: DeadlineOption = DEADLINE_TO_LOOK,
) -> None:
    """Check and print tiers. With all defaults, or, with --vllm, as the value of --kv-transfer-config.

    For example: vllm serve MODEL --kv-transfer-config "$(kvstore config --vllm -t file:///mnt/kv?capacity=500GiB)"
    """
    with Deadline(deadline):
        # Only this step reads files: tiers and secrets.
        tiers = [parse_tier(text) for text in tier]
        used: dict[Path, str] = {}
        doubts: list[str] = []
        for number, each in enumerate(tiers, 1):
            claim_paths(used, f"tier {number}", each.paths)
            try:
                check_before_opening(each.backend, each.config)
            except AbsentError as error:
                # The engine may run on another machine.
                doubts.append(f"tier {number}: {error}")
            doubts += [f"tier {number}: {text}" for text in doubts_before_opening(each.backend, each.config)]
    if not vllm:
        shown = [each.shown() for each in tiers]
        _print(shown, doubts, indent=1)
        return
    if spec not in ("kvstore", "tiering"):
        raise ConfigError(f"--spec is {spec!r}. Expected 'kvstore' or 'tiering'.")
    config = vllm_config(
        tiers,
        spec="kvstore" if spec == "kvstore" else "tiering",
        cpu_bytes=size_option(cpu, "--cpu"),
        manager=manager,
        eviction=eviction,
        tiering=json_object(tiering, "--tiering"),
        extra=json_object(extra, "--extra"),
    )
    if any(_holds_secret(each) for each in tiers):
        doubts.append("What follows holds a secret, and a command line can be seen by every user of the machine.")
    _print(config, doubts, indent=1 if pretty else None)


def _print(value: Any, doubts: Sequence[str], *, indent: int | None) -> None:
    for doubt in doubts:
        say(doubt)
    print_json_text(json_module.dumps(value, indent=indent, ensure_ascii=False))


def vllm_config(
    tiers: Sequence[TierArgument],
    *,
    spec: Spec = "kvstore",
    cpu_bytes: int = 8 << 30,
    manager: str = "kvstore",
    eviction: str | None = None,
    tiering: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the value of vLLM's ``--kv-transfer-config`` for tiers; the arguments are the options of the command."""
    labelled = _labelled(tiers)
    own_manager = spec == "kvstore" and manager == "kvstore"
    if manager not in ("kvstore", "vllm"):
        raise ConfigError(f"The manager is {manager!r}. Expected 'kvstore' or 'vllm'.")
    if cpu_bytes < _CPU_BYTES_LEAST:
        raise ConfigError(
            f"CPU memory of {cpu_bytes} bytes is less than a block, and every block passes through it. Give it a unit, "
            "such as '8GiB'."
        )
    policy = None if eviction is None else make_policy(eviction).name
    if not own_manager and policy not in (None, "lru", "arc"):
        raise ConfigError(f"Eviction policy {policy!r} is not supported by vLLM's manager. Supported: 'lru' and 'arc'.")
    found: dict[str, Any] = {}
    if spec == "kvstore":
        found |= {"spec_name": "KVStoreOffloadingSpec", "spec_module_path": _MODULE}
        found |= {} if own_manager else {"manager": "vllm"}
    else:
        found["spec_name"] = "TieringOffloadingSpec"
    found["cpu_bytes_to_use"] = int(cpu_bytes)
    if policy is not None:
        found["eviction_policy"] = policy
    if tiering:
        if not own_manager:
            raise ConfigError("Options of kvstore's manager, and vLLM's is to be used. Leave one of them out.")
        engine_tiering(tiering, [tier.name for tier in labelled])
        found["tiering"] = dict(tiering)
    taken = sorted(_OURS & set(extra or {}))
    if taken:
        raise ConfigError(f"Extra key {taken[0]!r}: there is an option for it, by which it is checked. Use that.")
    found |= extra or {}
    found["secondary_tiers"] = [_spelled(tier, spec) for tier in labelled]
    return {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": found}


def _holds_secret(tier: TierArgument) -> bool:
    """Return whether an option or a URL contains a secret itself, not its location."""
    masked = [name for name, value in tier.shown().items() if _MASK in json_module.dumps(value)]
    return any(not isinstance(tier.options.get(name), Mapping) for name in masked)


def _labelled(tiers: Sequence[TierArgument]) -> list[TierArgument]:
    """Label tiers that would have the same name, to distinguish them in metrics and policies."""
    labelled: list[TierArgument] = []
    for index, tier in enumerate(tiers):
        names = {other.name for other in labelled}
        if tier.name in names and not tier.config.label:
            tier = tier.with_options(label=f"{tier.backend.rpartition(':')[2]}-{index}")
        if tier.name in names:
            raise ConfigError(f"Two tiers have the name {tier.name!r}. Give each a label of its own.")
        labelled.append(tier)
    return labelled


def _spelled(tier: TierArgument, spec: Spec) -> dict[str, Any]:
    if spec == "kvstore":
        return {"type": tier.backend, **tier.options}
    return {"type": _TIER_TYPE, "module_path": _MODULE, "backend": tier.backend, **tier.options}
