"""``kvstore check``: checks the whole ``--kv-transfer-config``, with the code of the engine's start."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Annotated

from kvstore.cli.command_line import Argument, Exit, ExitCode, JsonFlag, Option, parsed_json, text_of, vllm_module
from kvstore.cli.report import Report
from kvstore.cli.terminal import print_json_text, print_line
from kvstore.errors import ConfigError
from kvstore.primary.memory import shortage
from kvstore.primary.pages import described_allocation
from kvstore.primary.shared import SHM

_Config = Annotated[
    str, Argument(metavar="JSON|@FILE", help="The value of vLLM's --kv-transfer-config; @- reads it from stdin.")
]
_SizeGib = Annotated[
    float | None, Option("--kv-offloading-size", metavar="GIB", help="The value of vLLM's argument of this name.")
]


def check_command(config: _Config, kv_offloading_size: _SizeGib = None, json: JsonFlag = False) -> None:
    """Check an engine's configuration. Reports all faults of a --kv-transfer-config, as the engine's start does.

    Run it in the engine's environment, because it imports vLLM. Nothing is opened or created; kvstore doctor checks the
    machine and reaches servers.
    """
    transfer = parsed_json(text_of(config, "configuration"), "The configuration")
    if not isinstance(transfer, dict) or "kv_connector" not in transfer:
        raise ConfigError("The configuration has no 'kv_connector'. Give the whole value of --kv-transfer-config.")
    startup = vllm_module("startup")
    arguments = SimpleNamespace(kv_offloading_size=kv_offloading_size)
    found = startup.transfer_faults(transfer, arguments)
    if found is None:
        raise ConfigError(
            "This configuration does not use kvstore. Expected a KVStoreConnector with "
            '"spec_name": "KVStoreOffloadingSpec" in \'kv_connector_extra_config\'.'
        )
    size_bytes = 0 if found[0] else startup.region_bytes(transfer, arguments)
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
            print_line(f"ok  {described_allocation(size_bytes)}")
    if found[0]:
        raise Exit(ExitCode.USAGE)
