"""Load generators of others drive a `vllm serve` whose only cache of prompts is kvstore; see bench/generators.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.generators import GENERATORS, Size, counted, make_tokenizer
from bench.vllm_overhead import serving
from examples.serving import Server
from examples.tiny_llama import make_tiny_llama

SIZE = Size(prefixes=3, prefix_tokens=512, suffix_tokens=64, requests=18, clients=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose only cache of prompts is kvstore."""
    work = tmp_path_factory.mktemp("serving")
    model = make_tiny_llama(work / "model")
    make_tokenizer(model)
    arguments = ("--no-enable-prefix-caching", "--max-model-len", "4096")
    room = {"block_tokens": 32, "cpu_bytes_to_use": 64 * 2**20}
    with serving(work, model, ["kvstore-file"], arguments=arguments, **room) as servers:
        yield servers["kvstore-file"]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_is_answered_and_its_prompts_are_found(server: Server, tmp_path: Path, name: str) -> None:
    """Every request has a first token, and at least a third of the tokens of all prompts come from kvstore."""
    before = [counted(server, each) for each in ("prompt_tokens_cached", "prompt_tokens")]
    result = GENERATORS[name](server, tmp_path, SIZE, 1)
    assert all(ttft_s > 0 for ttft_s in result.ttfts_s)
    cached, tokens = (counted(server, each) for each in ("prompt_tokens_cached", "prompt_tokens"))
    assert cached - before[0] > (tokens - before[1]) / 3
