"""``kvstore check``: checks tiers or the whole ``--kv-transfer-config``, with the code of the engine's start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Annotated, Any

from kvstore.cli.command_line import Argument, Exit, ExitCode, JsonFlag, Option, parsed_json, text_of, vllm_module
from kvstore.cli.report import Report
from kvstore.cli.terminal import print_json_text, print_line
from kvstore.cli.tier_argument import split_tier
from kvstore.errors import ConfigError
from kvstore.primary.memory import shortage
from kvstore.primary.pages import described_allocation
from kvstore.primary.shared import SHM

_CPU_BYTES = 8 << 30
"""Primary tier of the configuration in which tiers are checked alone; no memory is allocated."""

_Config = Annotated[
    str | None,
    Argument(metavar="JSON|@FILE", help="The value of vLLM's --kv-transfer-config; @- reads it from stdin."),
]
_Tiers = Annotated[
    list[str] | None,
    Option(
        "--tier", "-t", metavar="JSON|URL|@FILE", help="Check this tier in place of a whole configuration; several."
    ),
]
_SizeGib = Annotated[
    float | None, Option("--kv-offloading-size", metavar="GIB", help="The value of vLLM's argument of this name.")
]


def check_command(
    config: _Config = None, tier: _Tiers = None, kv_offloading_size: _SizeGib = None, json: JsonFlag = False
) -> None:
    """Check an engine's configuration. Reports all faults of a --kv-transfer-config, as the engine's start does.

    Run it in the engine's environment, because it imports vLLM. Nothing is opened or created; kvstore doctor checks the
    machine and reaches servers.
    """
    if (config is None) == (not tier):
        raise ConfigError(
            "Give either the value of --kv-transfer-config, or tiers: --tier 'file:///mnt/kv?capacity=1TiB'."
        )
    transfer = (
        _config_of(tier or ()) if config is None else parsed_json(text_of(config, "configuration"), "The configuration")
    )
    if not isinstance(transfer, dict) or "kv_connector" not in transfer:
        raise ConfigError(
            "The configuration has no 'kv_connector'. Give the whole value of --kv-transfer-config, or tiers by --tier."
        )
    startup = vllm_module("startup")
    arguments = SimpleNamespace(kv_offloading_size=kv_offloading_size)
    found = startup.transfer_faults(transfer, arguments)
    if found is None:
        raise ConfigError(
            "This configuration does not use kvstore. Expected a KVStoreConnector with "
            '"spec_name": "KVStoreOffloadingSpec" in \'kv_connector_extra_config\'.'
        )
    size_bytes = 0 if found[0] or tier else startup.region_bytes(transfer, arguments)
    # Only a warning: the engine may run on another machine, where its start refuses a primary tier that does not fit.
    if text := shortage(size_bytes, SHM):
        found[1].append(startup.Fault("", f"'cpu_bytes_to_use': {text}"))
    by_status = list(zip(("fail", "warn"), found, strict=True))
    if json:
        rows = [{"status": status, **asdict(each)} for status, some in by_status for each in some]
        print_json_text(Report("check", rows=rows).as_json())
    else:
        for status, some in by_status:
            for each in some:
                print_line(f"{status}  {each}")
        if not any(found):
            print_line(f"ok  {_counted_tiers(len(tier)) if tier else described_allocation(size_bytes)}")
    if found[0]:
        raise Exit(ExitCode.USAGE)


def _config_of(tiers: Sequence[str]) -> dict[str, Any]:
    """Return the value of --kv-transfer-config with these tiers, which are not checked yet."""
    split = [split_tier(text) for text in tiers]
    extra = {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "cpu_bytes_to_use": _CPU_BYTES,
        "secondary_tiers": [{"type": backend, **options} for backend, options in split],
    }
    return {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _counted_tiers(count: int) -> str:
    return "1 tier" if count == 1 else f"{count} tiers"
