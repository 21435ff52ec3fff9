"""Time to the first token of a real `vllm serve` by the place of the prompt's KV cache.

- computed: prompts that no engine has seen.
- memory: the same prompts again; vLLM's own cache has room for one, so their blocks come from CPU memory.
- disk: the same prompts after a SIGKILL and a restart.

Servers without offloading, with vLLM's manager and `fs` tier and with kvstore's defaults run side by side on the same
GPU, or the same cores, and receive each prompt in turns. ``ttft_s`` is the median, ``low`` and ``high`` its 95 %
interval, ``cached_tokens`` the median of the prompt tokens that were not computed.

    python bench/vllm_ttft.py [--model DIR] [--tokens 2000,8000] [--serve "--dtype bfloat16"] [--json FILE]

Without a model it makes a small Llama with random weights, for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, median_interval, reporting, runs_of
from bench.vllm_overhead import (
    VOCABULARY,
    bench_setup,
    engine,
    engine_settings,
    in_turns,
    make_prompts,
    model_arguments,
    say,
    serve,
    serving,
)
from examples.serving import Answer

SYSTEMS = ("none", "vllm-fs", "kvstore-file")
COLUMNS = ("op", "prompt_tokens", "system", "ttft_s", "low", "high", "cached_tokens", "outputs_equal", "runs")
OUTPUT_TOKENS = 8
_WARM_UP_TOKENS = 8000
_SETTLE_S = 5.0
"""Pause before a kill, because all systems store in the background; and a second for each GiB of CPU memory."""


def measure(work: Path, model: Path, lengths: Sequence[int], options: argparse.Namespace) -> Iterator[Row]:
    """Send prompts of each length three times; yield a row for each place, length and system."""
    prompts = {
        tokens: make_prompts(random.Random(tokens), runs_of(options, 5, quick=2), tokens, VOCABULARY)
        for tokens in lengths
    }
    blocks = -(-(max(lengths) + OUTPUT_TOKENS) // options.block_tokens)
    # One more for vLLM itself.
    sizes = ["--num-gpu-blocks-override", str(blocks + 1), "--max-model-len", str(blocks * options.block_tokens)]
    settings = engine_settings(options)
    settings["arguments"] = [*sizes, *settings["arguments"]]
    expected: dict[int, list[str]] = {}
    for places in (("computed", "memory"), ("disk",)):
        with serving(work, model, SYSTEMS, **settings) as servers:
            # The first requests of a length are slow, and the gate needs the engine's speed. Longer prompts would only
            # fill the disk.
            for tokens, server in itertools.product(
                {min(tokens, _WARM_UP_TOKENS) for tokens in lengths}, servers.values()
            ):
                serve(server, make_prompts(random.Random(f"{places} {tokens}"), 1, tokens, VOCABULARY), OUTPUT_TOKENS)
            for place, tokens in itertools.product(places, lengths):
                answers: dict[str, list[Answer]] = {system: [] for system in SYSTEMS}
                for number, prompt in enumerate(prompts[tokens]):
                    for system in in_turns(SYSTEMS, number):
                        answers[system] += serve(servers[system], [prompt], OUTPUT_TOKENS).answers
                for system, found in answers.items():
                    times = [answer.ttft_s for answer in found]
                    texts = [answer.text for answer in found]
                    low, high = median_interval(times)
                    say(f"  {tokens} tokens, {place}, {system}: {statistics.median(times):.3f} s")
                    yield {
                        "bench": "vllm",
                        "op": place,
                        "prompt_tokens": tokens,
                        "system": system,
                        "ttft_s": statistics.median(times),
                        "low": low,
                        "high": high,
                        "cached_tokens": statistics.median(answer.cached_tokens for answer in found),
                        "outputs_equal": texts == expected.setdefault(tokens, texts),
                        "runs": len(found),
                    }
            time.sleep(_SETTLE_S * (1 + options.cpu_gib / 5))


def main() -> int:
    """Measure and print; returns 0 if all outputs are equal."""
    parser = model_arguments(__doc__)
    parser.add_argument("--tokens", help="lengths of prompts, by comma (default: 1000,3000, with --quick 300)")
    options = parser.parse_args()
    lengths = [int(tokens) for tokens in (options.tokens or ("300" if options.quick else "1000,3000")).split(",")]
    with reporting(options, COLUMNS, engine=engine()) as rows, bench_setup(options) as (work, small):
        rows += measure(work, options.model or small, lengths, options)
    return 0 if all(row["outputs_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
