"""Kinds of requests and engines that a walk does not have: an engine stores their blocks, and another one loads them.

    python -m tests.vllm.walk.kinds --directory /tmp/kinds [--only fp8]

Prints one JSON object per kind. Tokens are compared with those of an engine without offloading, and each stored and
each loaded block with the one that an engine computes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.environment import ENGINE_IN_THIS_PROCESS

os.environ |= ENGINE_IN_THIS_PROCESS
os.environ |= {"OMP_NUM_THREADS": "1"}

import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from examples.tiny_llama import LlamaShape, make_tiny_llama
from tests.vllm.models import make_tiny_experts, make_tiny_fine_windows
from tests.vllm.preloaded import inspect_models_here
from tests.vllm.walk.blocks import TOLERANCE, BlockOracle, Seen, WatchedSpec, recording
from tests.vllm.walk.engine import core_of, mend_vllm, started

_PROMPTS = 6
_Input = dict[str, Any]


def _tokens(number: int) -> _Input:
    rng = random.Random(number)
    return {"prompt_token_ids": [rng.randrange(2, 512) for _ in range(250 + 37 * number)]}


def _embeddings(number: int) -> _Input:
    rows, generator = 250 + 37 * number, torch.Generator().manual_seed(number)
    return {"prompt_embeds": torch.randn(rows, LlamaShape().hidden, generator=generator) / 2}


@dataclass(frozen=True)
class Kind:
    """Requests, and the engines that answer them."""

    make: Callable[[Path], Path] = make_tiny_llama
    input_of: Callable[[int], _Input] = _tokens  # The input with this number.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    llm: Mapping[str, Any] = field(default_factory=dict)
    offloading: Mapping[str, Any] = field(default_factory=dict)
    numbers: torch.dtype = torch.float32  # Of the KV cache.
    runs: bool = True  # Whether vLLM's kernels for this CPU can answer them.
    continues: bool = False  # Whether the second engine gets the answers as part of the prompts.


KINDS = {
    "several answers": Kind(sampling={"n": 3, "temperature": 1, "top_k": 1, "logprobs": 2}),
    "structured output": Kind(sampling={"structured_outputs": StructuredOutputsParams(regex="(w[2-4][0-9]*)+")}),
    "prompt embeddings": Kind(input_of=_embeddings, llm={"enable_prompt_embeds": True}),
    "generated tokens": Kind(sampling={"max_tokens": 150}, offloading={"offload_prompt_only": False}, continues=True),
    "fp8": Kind(llm={"kv_cache_dtype": "fp8"}, numbers=torch.float8_e4m3fn, runs=torch.cpu._is_avx512_supported()),
    "experts": Kind(make=make_tiny_experts),
    "small blocks of windows": Kind(make=make_tiny_fine_windows),
}


def report_of(kind: Kind, model: str, directory: Path) -> dict[str, Any]:
    """Answer the requests of a kind three times, and compare."""
    offloading = {
        "spec_name": "WatchedSpec",
        "spec_module_path": "tests.vllm.walk.blocks",
        "cpu_bytes_to_use": 64 << 20,
        "tiering": {"gate": False},
        "secondary_tiers": [{"type": "file", "path": str(directory), "capacity": "1GiB", "load_timeout": 60}],
        **kind.offloading,
    }
    inputs = [kind.input_of(number) for number in range(_PROMPTS)]
    WatchedSpec.numbers, WatchedSpec.seen = kind.numbers, None
    with started(model, None, enable_prefix_caching=False, **kind.llm) as llm:
        expected = _answers(llm, kind, inputs)
        later = [
            {"prompt_token_ids": [*each["prompt_token_ids"], *answer[0]]} if kind.continues else each
            for each, (answer, _) in zip(inputs, expected, strict=True)
        ]
        expected_later = _answers(llm, kind, later)
    seen: list[Seen] = []
    WatchedSpec.seen = seen.append
    with started(model, offloading, **kind.llm) as llm:
        stored = _answers(llm, kind, inputs)
    # A number next to another one may be rounded to either.
    oracle = BlockOracle(max(TOLERANCE, torch.finfo(kind.numbers).eps))
    with started(model, offloading, **kind.llm) as llm:
        loaded = _answers(llm, kind, later)
        assert llm.reset_prefix_cache(reset_connector=True)
        oracle.expected.append({})
        WatchedSpec.seen = recording(oracle.expected[0])
        for each in later:
            _answers(llm, kind, [each], {"kv_transfer_params": {"kvstore": {"load": False}}})
            assert llm.reset_prefix_cache()
    for each in seen:
        oracle.judge(each)
    pairs = [*zip(stored, expected, strict=True), *zip(loaded, expected_later, strict=True)]
    return {
        "wrong": [str(pair) for pair in pairs if pair[0][0] != pair[1][0]],
        "wrong blocks": oracle.wrong,
        "counts": {"requests": 2 * _PROMPTS, "cached tokens": sum(cached for _, cached in loaded), **oracle.counts},
        "largest difference of a block": oracle.largest,
    }


def _answers(
    llm: Any, kind: Kind, inputs: list[_Input], extra: dict[str, Any] | None = None
) -> list[tuple[list[list[int]], int]]:
    """Return the tokens of each answer to each input, and the number of cached tokens, once all stores have ended."""
    params = SamplingParams(
        **{"max_tokens": 8, "temperature": 0, "ignore_eos": True, **kind.sampling}, extra_args=extra
    )
    outputs = llm.generate(inputs, params, use_tqdm=False)
    while core_of(llm).scheduler.has_requests():
        llm.llm_engine.step()
    return [([list(each.token_ids) for each in output.outputs], output.num_cached_tokens or 0) for output in outputs]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.walk.kinds", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--directory", type=Path, required=True, help="for models and tiers")
    parser.add_argument("--only", help="the name of a kind")
    args = parser.parse_args()
    mend_vllm(speculates=False)
    inspect_models_here()
    bad = 0
    for name, kind in KINDS.items():
        if args.only in (None, name) and not kind.runs:
            print(json.dumps({"kind": name, "not run": "vLLM has no kernels for it on this CPU"}), flush=True)
        elif args.only in (None, name):
            model = args.directory / "models" / kind.make.__name__
            report = report_of(kind, str(model if model.exists() else kind.make(model)), args.directory / name)
            bad += bool(report["wrong"] or report["wrong blocks"] or not report["counts"].get("loaded blocks"))
            print(json.dumps({"kind": name, **report}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
