"""A real engine whose MultiConnector has kvstore's connector and another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, Start, full_blocks, managed, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_the_other_connector_serves_blocks_that_kvstore_has_lost(start: Start, tmp_path: Path) -> None:
    """Both store; either serves a prompt without the other, with the same tokens."""
    ours: dict[str, Any] = {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": managed(tmp_path / "kv"),
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    text = prompt(1, 640)
    answers = []
    for lost in (None, "other", "kv"):
        if lost:
            shutil.rmtree(tmp_path / lost)
            (tmp_path / lost).mkdir()
        engine = start(offloading={"connectors": [ours, other]})
        answers += engine.ask(text)
        engine.call("settle")
        engine.close()
    assert [answer["cached"] for answer in answers] == [
        0,
        full_blocks(640),
        640 - BLOCK_TOKENS,
    ]  # vLLM's example leaves the last block.
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1
