"""Walk: random requests to real engines with slow and failing tiers, every answer and every block compared.

    python -m tests.vllm.walk --seed 7 --requests 2000 --directory /tmp/walk

Prints one JSON object per leg, and a last one with ``"done": true``. The exit status is 0 only if every answer and
every block was right, every engine survived, and none left state behind. A seed determines the plan, but not the end
times of copies.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.vllm.environment import ENGINE_IN_THIS_PROCESS

os.environ |= ENGINE_IN_THIS_PROCESS
os.environ |= {
    # Two walks share two cores. Numba, used for n-grams, sets the number of OpenMP threads to the number of cores, and
    # a step of a tiny model would mostly wait for them; compiling takes longer than running the compiled code.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "NUMBA_DISABLE_JIT": "1",
}

import vllm

from examples.tiny_llama import make_tiny_llama
from tests.vllm.models import make_adapter, make_tiny_hybrid, make_tiny_mamba
from tests.vllm.preloaded import inspect_models_here
from tests.vllm.walk.answers import right_answers
from tests.vllm.walk.blocks import BlockOracle, WatchedSpec, expected_blocks
from tests.vllm.walk.engine import adapter_path, engine_ids, lora_options, mend_vllm, started
from tests.vllm.walk.leftovers import leftovers
from tests.vllm.walk.plan import ADAPTERS, WEIGHTS, Leg, Prompt, plan_legs, plan_prompts
from tests.vllm.walk.slow_copies import SlowSpec
from tests.vllm.walk.walk import Walk


def _make_with_adapters(directory: Path) -> Path:
    make_tiny_llama(directory)
    for number in range(1, ADAPTERS + 1):
        make_adapter(adapter_path(str(directory), number), directory, number)
    return directory


MAKERS = {"dense": make_tiny_llama, "window": make_tiny_hybrid, "mamba": make_tiny_mamba, "lora": _make_with_adapters}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.walk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--directory", type=Path, required=True, help="for models and tiers")
    parser.add_argument("--only", help="a model, a manager, or both: dense-kvstore")
    args = parser.parse_args()
    version = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
    legs = plan_legs(args.seed, args.requests, version)
    if args.only:
        legs = [leg for leg in legs if args.only in f"{leg.model}-{leg.manager}"]
    mend_vllm(speculates=True)
    inspect_models_here()
    gc.freeze()  # Each engine collects garbage several times, and the imports contain none.
    bad = 0
    for report in walk(legs, plan_prompts(args.seed), args.directory):
        bad += any(report[name] for name in ("wrong", "wrong blocks", "error", "left"))
        print(json.dumps({"vllm": vllm.__version__, "seed": args.seed, **report}), flush=True)
    last = {"done": True, "vllm": vllm.__version__, "seed": args.seed, "bad legs": bad, "cpu_s": round(_cpu_s(), 1)}
    print(json.dumps(last), flush=True)
    return 1 if bad else 0


def walk(legs: list[Leg], prompts: list[Prompt], directory: Path) -> Iterator[dict[str, Any]]:
    """Run all legs; yield a report of each."""
    for name, same in groupby(legs, key=lambda leg: leg.model):
        group, asked = list(same), prompts
        model = MAKERS[name](directory / name) if not (directory / name).exists() else directory / name
        before = _cpu_s()
        if name != "lora":
            asked = [replace(prompt, adapter=0) for prompt in prompts]
        answers = right_answers(str(model), asked, WEIGHTS, **lora_options(group[0].llm))
        print(json.dumps({"answers of": name, "cpu_s": round(_cpu_s() - before, 1)}), flush=True)
        for leg in group:
            yield _leg(leg, str(model), asked, answers, directory / "tiers")


def _leg(leg: Leg, model: str, prompts: list[Prompt], answers: Any, directory: Path) -> dict[str, Any]:
    began, cpu_s = time.monotonic(), _cpu_s()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    SlowSpec.seed = leg.seed
    SlowSpec.workers.clear()
    oracle = BlockOracle()
    report: dict[str, Any] = {
        "leg": f"{leg.model}-{leg.manager}",
        "plan": {**leg.llm, **leg.offloading, "weights": leg.weights, "resets_weights_first": leg.resets_weights_first},
        "requests": leg.requests,
        "error": "",
        "wrong": [],
        "wrong blocks": oracle.wrong,
        "left": {},
        "counts": {},
    }
    walker = None
    try:
        oracle.expected = expected_blocks(model, leg, prompts)
        WatchedSpec.version, WatchedSpec.seen = 0, oracle.judge
        with started(model, leg.extra(directory), **leg.llm) as llm:
            try:
                walker = Walk(llm, model, leg, prompts, answers)
                walker.run()
                report["left"] = leftovers(llm)
            finally:
                del llm
    # The error ended the engine, but the other legs still run.
    except Exception:
        report["error"] = traceback.format_exc()
    if walker is not None:
        report["counts"], report["wrong"] = dict(walker.counts + oracle.counts), walker.wrong
    report["largest difference of a block"] = oracle.largest
    if files := sorted(name for name in os.listdir("/dev/shm") if engine_ids() in name):
        report["left"] = {**report["left"], "/dev/shm": files}
    report["total_s"] = round(time.monotonic() - began, 1)
    report["cpu_s"] = round(_cpu_s() - cpu_s, 1)
    return report


def _cpu_s() -> float:
    return sum(os.times()[:4])


if __name__ == "__main__":
    sys.exit(main())
