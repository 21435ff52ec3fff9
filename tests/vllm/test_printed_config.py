"""Output of ``kvstore config --vllm``, read by vLLM and by kvstore's own checks inside it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.in_process import run_here

# It starts no engine, but importing vLLM takes as long as half of the other tool tests that would run beside it.
pytestmark = pytest.mark.engine

_FILE = '{"type": "file", "path": "/mnt/kv", "capacity": "500GiB"}'
_OTHER_FILE = '{"type": "file", "path": "/mnt/other", "capacity": "500GiB"}'
_REDIS = '{"type": "redis", "url": "redis://127.0.0.1:6379"}'


def _printed(*arguments: str) -> dict[str, Any]:
    done = run_here("config", "--vllm", "--tier", _FILE, "--tier", _OTHER_FILE, "--tier", _REDIS, *arguments)
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--eviction", "arc", "--tiering", '{"policy": {"min_uses": 2, "tiers": ["file-1"]}}'],
        ["--manager", "vllm", "--eviction", "arc"],
        ["--spec", "tiering"],
    ],
)
def test_printed_configuration_is_valid_for_vllm_and_kvstore(arguments: list[str]) -> None:
    """Its string is valid for vLLM's configuration, and its tiers for kvstore's checks in the engine."""
    config_module = pytest.importorskip("vllm.config")
    from kvstore.vllm.options import TIER_TYPE, check_options, check_tiering, is_own_manager, with_short_types

    config = config_module.KVTransferConfig(**_printed(*arguments))
    extra = with_short_types(config.kv_connector_extra_config)
    for tier in extra["secondary_tiers"]:
        assert tier["type"] == TIER_TYPE
        check_options(tier, tier_type=TIER_TYPE)
    assert [tier.get("label") for tier in extra["secondary_tiers"]] == [None, "file-1", None]
    if config.kv_connector_extra_config["spec_name"] == "KVStoreOffloadingSpec":
        check_tiering(extra)
        assert is_own_manager(extra) is ("vllm" not in arguments)
