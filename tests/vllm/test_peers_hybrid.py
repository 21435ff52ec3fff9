"""Prefill and decode on two real engines of a sliding-window model, and with different block sizes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.peer.ports import free_port
from tests.vllm.engines import Engine, Start, full_blocks, prompt
from tests.vllm.models import make_tiny_hybrid
from tests.vllm.peers import offloading

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = prompt(1, 700)
LLM: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 128}
"""The prompt is computed in six pieces, so blocks are fetched while others are computed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with sliding windows."""
    return make_tiny_hybrid(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def port() -> int:
    """The port of the prefill engine."""
    return free_port()


@pytest.fixture(scope="module")
def prefill(start: Start, port: int) -> Engine:
    """The engine that prefills."""
    return start(offloading=offloading(listen=f"127.0.0.1:{port}"), llm=LLM)


def pull(prefill: Engine, decode: Engine, port: int) -> dict[str, Any]:
    """Send the prompt to both engines at once; return the decode engine's answer."""

    def compute() -> None:
        prefill.call("ask", [PROMPT], 1, None, {"remote_decoder": {"kv_request_id": "r"}})
        prefill.call("settle")

    computing = threading.Thread(target=compute)
    computing.start()
    named = {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": port}
    (answer,) = decode.call("ask", [PROMPT], 6, None, {"remote_prefiller": named})
    computing.join()
    found: dict[str, Any] = answer
    return found


def computed_by(engine: Engine) -> list[int]:
    """Return the tokens of an engine after a reset, so that it shares no block with the other any more."""
    engine.call("settle")
    engine.call("reset")
    (answer,) = engine.ask(PROMPT)
    assert answer["cached"] == 0
    tokens: list[int] = answer["tokens"]
    return tokens


def test_blocks_of_windows_are_pulled(start: Start, prefill: Engine, port: int) -> None:
    """The decode engine loads all full blocks of all groups, and its answers equal computed ones."""
    decode = start(offloading=offloading(request_peers=["127.0.0.0/8:1024-65535"]), llm=LLM)
    assert decode.call("groups") == 3
    pulled = pull(prefill, decode, port)
    assert pulled["cached"] == full_blocks(700)
    assert pulled["tokens"] == computed_by(decode)
    assert prefill.call("tier_errors") == decode.call("tier_errors") == 0
    decode.close()


def test_another_block_size_is_computed_and_logged(start: Start, prefill: Engine, port: int) -> None:
    """Engines with different block sizes share no blocks: the prompt is computed, and a message gives the reason."""
    patient = {"connect_timeout": 20, "timeout": 20}
    tier = offloading(request_peers=["127.0.0.0/8:1024-65535"], **patient)
    decode = start(offloading=tier, llm={**LLM, "block_size": 64})
    pulled = pull(prefill, decode, port)
    assert pulled["cached"] == 0
    assert f"Peer 127.0.0.1:{port} has blocks of another namespace" in decode.text()
    assert pulled["tokens"] == computed_by(decode)
    assert decode.call("tier_errors") == 0
    decode.close()
