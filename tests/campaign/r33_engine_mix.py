"""R33: requests of every kind get the right tokens, whichever engine computed their blocks.

Method: two real engines of different tensor parallelism with disk and peer tiers, small steps, and LoRA adapters or
sliding windows; concurrent requests with salts, priorities, n > 1, structured output, hand-overs, disconnects, resets.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from prefill_decode import loaded_bytes
from serving import Server, free_port
from tiny_llama import make_tiny_llama

from tests.campaign.answers import TIMEOUT_S, certain, post
from tests.campaign.program import failed, passed, rounds
from tests.vllm.models import make_adapter, make_tiny_hybrid

REQUESTS: Final = 500
"""Of each plan."""
AT_ONCE: Final = 6
PROMPTS: Final = 30
TOKENS: Final = 8


@dataclass(frozen=True)
class Plan:
    """Two engines; the second one also loads what the first one hands over."""

    model: str  # ``"lora"`` or ``"window"``.
    parallel: tuple[int, int]  # Tensor parallelism of each engine.
    budget: tuple[int, int]  # Tokens of a step of each engine.


PLANS: Final = (
    Plan("lora", (1, 2), (48, 256)),
    Plan("window", (1, 1), (64, 48)),
    Plan("lora", (1, 1), (512, 64)),
    Plan("window", (2, 1), (128, 512)),
)


@dataclass(frozen=True)
class Case:
    """A request with one right answer."""

    prompt: tuple[int, ...]  # Its tokens.
    adapter: str  # Name of its adapter; empty for the base model.
    is_structured: bool  # Whether its words begin with w2, w3 or w4.

    def body(self, model: str) -> dict[str, Any]:
        """Return the fields of a request for it."""
        structure = {"structured_outputs": {"regex": "(w[2-4][0-9]*)+"}} if self.is_structured else {}
        return {
            "model": self.adapter or model,
            "prompt": list(self.prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **structure,
        }


class Mix:
    """The requests of a plan.

    Args:
        plan: The plan.
        seed: Seed of the draws.
        work: Directory for models, tiers and logs.
    """

    def __init__(self, plan: Plan, seed: int, work: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._plan, self._choose, self._work, self._seed = plan, random.Random(seed), work, seed
        self._model = (make_tiny_hybrid if plan.model == "window" else make_tiny_llama)(work / "model")
        names = ("one", "two") if plan.model == "lora" else ()
        self._adapters = {name: make_adapter(work / name, self._model, len(name) + i) for i, name in enumerate(names)}
        self._port = free_port()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Compute the right answers, start both engines, and compare all answers."""
        cases = self._cases()
        with ExitStack() as stack:
            plain = self._serve(stack, "plain", 1, 512, None)
            plain.wait_ready()
            bodies = [case.body(plain.model) for case in cases]
            with ThreadPoolExecutor(4) as pool:
                answers = pool.map(partial(certain, plain.port), bodies)
            right = {case: tokens for case, (tokens, _) in zip(cases, answers, strict=True)}
        distinct = len({(case.prompt, *right[case]) for case in cases})
        prompts = len({case.prompt for case in cases})
        if distinct < 1.5 * prompts:
            failed(f"{distinct} distinct answers to {prompts} prompts: neither adapters nor structure change them")
        with ExitStack() as stack:
            engines = [
                self._serve(stack, f"engine{side}", self._plan.parallel[side], self._plan.budget[side], side)
                for side in (0, 1)
            ]
            for engine in engines:
                engine.wait_ready()
            draws = [self._choose.getrandbits(32) for _ in range(REQUESTS)]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda draw: self._ask(random.Random(draw), engines, cases, right), draws))
            self.counts["MB from tiers"] = round(sum(map(loaded_bytes, engines)) / 1e6)

    def _cases(self) -> list[Case]:
        choose = self._choose
        families = [[choose.randrange(2, 512) for _ in range(900)] for _ in range(4)]
        cases = []
        for _ in range(PROMPTS):
            prompt = choose.choice(families)[: choose.choice([33, 64, 100, 250, 400, 640, 896])]
            if choose.random() < 0.3:
                prompt = prompt[:-5] + [choose.randrange(2, 512) for _ in range(5)]
            cases += [
                Case(tuple(prompt), adapter, is_structured)
                for adapter in ("", *self._adapters)
                for is_structured in (False, True)
            ]
        return list(dict.fromkeys(cases))

    def _serve(self, stack: ExitStack, name: str, parallel: int, budget: int, side: int | None) -> Server:
        offloading = None
        arguments = ["--max-model-len", "1024", "--max-num-batched-tokens", str(budget)]
        if side is None:
            arguments += ["--no-enable-prefix-caching"]
        else:
            peer = (
                {"listen": f"127.0.0.1:{self._port}"} if side == 0 else {"request_peers": [f"127.0.0.1:{self._port}"]}
            )
            timeouts = {"lookup_timeout": 10, "load_timeout": 30}
            offloading = {
                "spec_name": "KVStoreOffloadingSpec",
                "spec_module_path": "kvstore.vllm",
                "cpu_bytes_to_use": 40 * 32768,
                "tiering": {"allow": ["store", "load", "remote_decoder"]},
                "secondary_tiers": [
                    {"type": "peer", "secret": "a secret of sixteen", **timeouts, **peer},
                    {"type": "file", "path": str(self._work / "kv"), "capacity": "16MiB", "reserve": 0, **timeouts},
                ],
            }
            arguments += ["--num-gpu-blocks-override", "100", "--scheduling-policy", "priority"]
        if parallel > 1:
            arguments += ["--tensor-parallel-size", str(parallel)]
        if self._adapters:
            # In a batch with adapters, vLLM's CPU kernels apply the last slot to the base model. So one stays empty.
            modules = [f"{adapter}={path}" for adapter, path in self._adapters.items()]
            arguments += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--lora-modules", *modules]
        cores = sorted(os.sched_getaffinity(0))
        half = cores[side::2] if side is not None and len(cores) > 1 else cores
        options: dict[str, Any] = {"offloading": offloading, "arguments": arguments, "cores": half}
        server = Server(name, self._model, self._work, block_tokens=32, **options)
        stack.callback(server.kill)
        return server

    def _ask(
        self, choose: random.Random, engines: Sequence[Server], cases: list[Case], right: dict[Case, list[int]]
    ) -> None:
        if choose.random() < 0.03:
            self._reset(choose, choose.choice(engines))
        case = choose.choice(cases)
        body = {**case.body(engines[0].model), "priority": choose.randrange(3)}
        if choose.random() < 0.3:
            body["cache_salt"] = choose.choice(["alice", "bob"])
        if choose.random() < 0.15:
            # The best token only, from one sample or another.
            body |= {"n": 2, "temperature": 1, "top_k": 1}
        if choose.random() < 0.2:
            body["kv_transfer_params"] = {"kvstore": choose.choice([{"store": False}, {"load": False}, {"store": 0.5}])}
        patience_s = choose.uniform(0.05, 1) if choose.random() < 0.08 else TIMEOUT_S
        handed_over, engine = choose.random() < 0.4, choose.choice(engines)
        if handed_over:
            answer = self._hand_over(engines, body, patience_s)
        else:
            answer = post(engine.port, "/v1/completions", body, patience_s)
        with self._lock:
            self._check(case, body, answer, right[case], "both engines" if handed_over else engine.name)

    def _hand_over(self, engines: Sequence[Server], body: dict[str, Any], patience_s: float) -> Any:
        name = uuid.uuid4().hex
        source = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": self._port}
        prefill = {**body, "max_tokens": 1, "n": 1, "kv_transfer_params": {"remote_decoder": {"kv_request_id": name}}}
        prefill.pop("structured_outputs", None)
        decode = {**body, "kv_transfer_params": {"remote_prefiller": source}}
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(post, engines[0].port, "/v1/completions", prefill)
            answer = post(engines[1].port, "/v1/completions", decode, patience_s)
            prefilled.result()
        return answer

    def _reset(self, choose: random.Random, engine: Server) -> None:
        more = "?reset_external=true" if choose.random() < 0.5 else ""
        post(engine.port, f"/reset_prefix_cache{more}", {})
        self.counts["resets"] += 1

    def _check(self, case: Case, body: dict[str, Any], answer: Any, right: list[int], where: str) -> None:
        self.counts["requests"] += 1
        if answer is None:
            self.counts["disconnects"] += 1
            return
        details = answer["usage"].get("prompt_tokens_details") or {}
        self.counts["cached tokens"] += details.get("cached_tokens") or 0
        self.counts["hand-overs"] += where == "both engines"
        self.counts["structured"] += case.is_structured
        self.counts["with adapters"] += bool(case.adapter)
        for choice in answer["choices"]:
            if choice["token_ids"][: len(right)] != right or len(choice["token_ids"]) != TOKENS:
                shown = {name: value for name, value in body.items() if name != "prompt"}
                found = f"{where}, {len(case.prompt)} tokens, cached {details}: {choice['token_ids']}"
                self.wrong.append(f"{found}, right is {right}; {shown}")


if __name__ == "__main__":
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    total: Counter[str] = Counter()
    for seed in rounds():
        for number, plan in enumerate(PLANS):
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="kvstore-r33-") as folder:
                mix = Mix(plan, seed + number, Path(folder))
                mix.run()
            print(f"{plan}: {dict(mix.counts)}, {time.monotonic() - began:.0f} s", flush=True)
            if not all(mix.counts[name] for name in ("MB from tiers", "hand-overs", "cached tokens")):
                failed(f"{plan}, seed {seed}: too little was loaded: {dict(mix.counts)}")
            if mix.wrong:
                failed(f"{plan}, seed {seed}: {len(mix.wrong)} wrong answers; the first: {mix.wrong[0][:500]}")
            total += mix.counts
    passed(", ".join(f"{count} {what}" for what, count in total.items()) + ", 0 wrong")
