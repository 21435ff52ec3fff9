"""One leg of a walk: random requests to one engine, with every answer compared, and the state left at the end."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import RequestStatus

from tests.vllm.walk.answers import Answers
from tests.vllm.walk.blocks import WatchedSpec
from tests.vllm.walk.engine import Weights, adapter_of, core_of, inputs_of, scribble
from tests.vllm.walk.plan import TOKENS_MAX, Leg, Prompt, plan_policy

STUCK_S = 60
"""Without any answer for this long, an engine with requests counts as hanging."""
LIVE_MAX = 14
SESSIONS = 0.2
"""Share of requests that are streaming-input sessions."""


class WalkError(Exception):
    """The engine hangs, or an answer is wrong."""


class Walk:
    """Drives the engine through a leg."""

    def __init__(self, llm: Any, model: str, leg: Leg, prompts: list[Prompt], answers: Answers) -> None:
        self.counts: Counter[str] = Counter()  # Number of each kind of event, by name.
        self.wrong: list[str] = []  # Descriptions of wrong answers.
        self._llm, self._model, self._leg, self._prompts, self._answers = llm, model, leg, prompts, answers
        self._core, self._engine = core_of(llm), llm.llm_engine
        self._rng = random.Random(leg.seed)
        self._weights, self._version = Weights(llm), 0
        self._live: dict[str, tuple[int, int, int]] = {}
        self._turns: dict[str, list[tuple[Prompt, bool, SamplingParams]]] = {}
        """The rest of each live session: its prompt, whether another turn may follow, and parameters."""
        self._due: Counter[str] = Counter()  # Tokens of the answers to a session's turns so far.
        self._texts: dict[str, list[int]] = {}
        """The tokens of live requests so far, also of earlier turns."""
        self._asked = 0
        self._answered_at = time.monotonic()
        self._count_preemptions()

    def run(self) -> None:
        """Run the complete leg, and wait until all requests and jobs have ended."""
        rng, changes_at = self._rng, self._changes_at()
        while self._asked < self._leg.requests or self._live:
            if self._asked < self._leg.requests and len(self._live) < LIVE_MAX:
                for _ in range(rng.randrange(4)):
                    self._ask()
            self._step(1 + rng.randrange(6))
            self._interfere(rng.random())
            if changes_at and self._asked >= changes_at[0]:
                changes_at.pop(0)
                self._change_weights()
        self.settle()
        self._count_blocks()

    def settle(self) -> None:
        """Step until the scheduler is idle, stores included."""
        deadline = time.monotonic() + STUCK_S
        self._flush()
        while self._core.scheduler.has_requests():
            self._step(1)
            self._flush()
            if time.monotonic() > deadline:
                raise WalkError("stores, loads or finished requests do not come to their end")

    def _changes_at(self) -> list[int]:
        versions = self._leg.weights
        return [self._leg.requests * i // versions for i in range(1, versions)]

    def _interfere(self, dice: float) -> None:
        if 0.09 <= dice < 0.21 and self._leg.weights > 1 and self._rng.random() < 0.75:
            return  # A reset drops all blocks here, and some must survive until their next use.
        if dice < 0.06 and self._live:
            self._abort([self._rng.choice(list(self._live))])
        elif dice < 0.09:
            self.counts["device resets"] += self._reset(connector=False, running=False)
        elif dice < 0.14:
            # The device refuses while requests run, but the connector does not. For requests that continue, vLLM's
            # manager then stores freed blocks of windows and states again: wrong tokens, or a
            # dead engine, even without our code.
            if self._leg.manager == "vllm" and self._leg.model != "dense":
                self._drain()
            self._reset(connector=True, running=False)
            self.counts["resets"] += 1
        elif dice < 0.18:
            self.counts["running resets"] += self._reset(connector=True, running=True)
        elif dice < 0.21:
            self._drain()
            self.counts["drained resets"] += self._reset(connector=True, running=False)
        elif dice < 0.23:
            self._sleep()
        elif dice < 0.33:
            time.sleep(self._rng.random() * 0.01)  # I/O continues while the engine is busy elsewhere.

    def _ask(self) -> None:
        if self._asked >= self._leg.requests:
            return
        rng, index = self._rng, self._rng.randrange(len(self._prompts))
        prompt = self._prompts[index]
        tokens = rng.choice((1, rng.randrange(1, TOKENS_MAX + 1), TOKENS_MAX))
        policy = plan_policy(rng)
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if policy is None else {"kv_transfer_params": {"kvstore": policy}},
        )
        name = f"walk-{self._leg.seed}-{self._asked}"
        priority = rng.randrange(3) if self._leg.llm["scheduling_policy"] == "priority" else 0
        if rng.random() < SESSIONS:
            self._turns[name] = _turns_of(prompt, params, rng)
            self._next_turn(name)
        else:
            adapter = adapter_of(self._model, prompt)
            self._engine.add_request(name, inputs_of(prompt), params, lora_request=adapter, priority=priority)
        self._live[name] = (index, tokens, self._version)
        self._texts[name] = []
        self._asked += 1

    def _next_turn(self, name: str) -> None:
        """Add the next turn of a session, or its end once its last turn is answered."""
        prompt, is_resumable, params = self._turns[name][0]
        if not is_resumable and len(self._texts[name]) < self._due[name]:
            return
        self._due[name] += params.max_tokens or 0
        self._turns[name].pop(0)
        request = self._engine.input_processor.process_inputs(
            name,
            inputs_of(prompt),
            params,
            lora_request=adapter_of(self._model, prompt),
            supported_tasks=self._engine.get_supported_tasks(),
            resumable=is_resumable,
        )
        request.external_req_id = name
        shown = copy.copy(request)
        shown.prompt_token_ids = list(prompt.tokens)  # Both halves extend their list at each turn.
        self._engine.output_processor.add_request(shown, None, None, 0)
        self._engine.engine_core.add_request(request)
        self.counts["turns"] += 1
        if not is_resumable:
            # Then vLLM's own loop has no output for the end.
            del self._turns[name]
            self._check(name, 0)

    def _step(self, count: int) -> None:
        for _ in range(count):
            self.counts["steps"] += 1
            for name in [name for name in self._turns if self._rng.random() < 0.5]:
                self._next_turn(name)
            for output in self._engine.step():
                if output.request_id in self._texts:
                    self._texts[output.request_id] += output.outputs[0].token_ids
                if output.finished:
                    self._check(output.request_id, output.num_cached_tokens or 0)
            if not self._core.scheduler.has_requests():
                self._answered_at = time.monotonic()
                return
        if self._live and time.monotonic() - self._answered_at > STUCK_S:
            raise WalkError(f"no answer for {STUCK_S} s: {self._state()}")

    def _state(self) -> dict[str, Any]:
        """Return the state for a report of a stuck engine: requests, their device blocks, and the manager's jobs."""
        scheduler = self._core.scheduler
        blocks = scheduler.kv_cache_manager
        requests = {
            name: (
                request.status.name,
                f"{request.num_computed_tokens} of {request.num_tokens} tokens",
                [len(group) for group in blocks.get_block_ids(name)],
            )
            for name, request in scheduler.requests.items()
        }
        manager = scheduler.connector.connector_scheduler.manager
        return {
            "requests": requests,
            "running": len(scheduler.running),
            "free device blocks": blocks.block_pool.get_num_free_blocks(),
            "manager": str(manager.manager.stats()) if self._leg.manager == "kvstore" else "",
        }

    def _check(self, name: str, cached: int) -> None:
        self._answered_at = time.monotonic()
        request = self._live.pop(name, None)
        if request is None:
            return
        index, tokens, version = request
        got = self._texts.pop(name)[-tokens:]
        self.counts["answers"] += 1
        self.counts["cached tokens"] += cached
        right = self._answers[version][index][:tokens]
        if got[: len(right)] != right or len(got) != tokens:
            self.wrong.append(
                f"{name}: prompt {index} ({len(self._prompts[index].tokens)} tokens), weights {version}, "
                f"cached {cached}: got {got}, right is {right}"
            )

    def _abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        for name in names:
            del self._live[name], self._texts[name]
            self._turns.pop(name, None)
        self.counts["aborts"] += len(names)
        self._answered_at = time.monotonic()

    def _drain(self) -> None:
        """Finish all requests, but not their remaining stores."""
        while self._live:
            self._step(1)

    def _reset(self, *, connector: bool, running: bool) -> bool:
        if running:
            # vLLM fails, as sessions between two turns hold blocks and do not run.
            self._abort([name for name in self._turns if name in self._live])
            self._finish_loads()
        if connector:
            self._flush()
        return bool(self._engine.reset_prefix_cache(running, connector))

    def _finish_loads(self) -> None:
        """Step until only running requests have blocks, so that no request waits for a load or has just had one.

        Otherwise vLLM refuses to reset running requests after it has preempted them, and fails a step later: a request
        that finds its blocks in the primary tier in the next step has a load then, and vLLM asserts that a preempted
        request has only stores (0.31 and 0.32; 0.33 excludes loads of that same step).
        """
        scheduler, deadline = self._core.scheduler, time.monotonic() + STUCK_S
        while any(
            any(scheduler.kv_cache_manager.get_block_ids(name))
            for name in scheduler.requests.keys() - {request.request_id for request in scheduler.running}
            if scheduler.requests[name].status is not RequestStatus.WAITING_FOR_STREAMING_REQ
        ):
            self._step(1)
            if time.monotonic() > deadline:
                raise WalkError("loads do not come to their end")

    def _flush(self) -> None:
        """Step until vLLM's connector has reported to the worker which jobs the last reset has ended.

        Without a request it does not step, and a second reset before the next step fails an assertion that ends the
        engine (in each version from 0.31 to 0.33).
        """
        connector = self._core.scheduler.connector.connector_scheduler
        while connector._current_batch_jobs_to_flush:
            params = SamplingParams(max_tokens=1, temperature=0)
            self._engine.add_request(f"flush-{self.counts['steps']}", {"prompt_token_ids": [2, 3]}, params)
            self._step(1)

    def _sleep(self) -> None:
        """Sleep and wake up; the KV cache's memory has other content afterwards."""
        if self._rng.random() < 0.5:
            self._drain()
        self._abort(list(self._live))
        self._finish_loads()
        self._flush()
        self._engine.sleep(1)
        scribble(self._llm, self._rng)
        self._engine.wake_up()
        self.counts["sleeps"] += 1

    def _change_weights(self) -> None:
        """Change the weights while no request runs, and reset all caches, before or after it."""
        if self._rng.random() < 0.5:
            self._drain()
        self._abort(list(self._live))
        self._version += 1
        if self._leg.resets_weights_first:
            self._reset_for_certain()
        self._weights.change(self._version)
        if not self._leg.resets_weights_first:
            self._reset_for_certain()
        WatchedSpec.version = self._version
        self.counts["weights"] += 1

    def _reset_for_certain(self) -> None:
        deadline = time.monotonic() + STUCK_S
        while not self._reset(connector=True, running=True):
            self._step(1)
            if time.monotonic() > deadline:
                raise WalkError("a reset is refused for ever")

    def _count_blocks(self) -> None:
        """Count the moved blocks, because cached tokens may all come from the device."""
        manager = self._core.scheduler.connector.connector_scheduler.manager
        if self._leg.manager == "kvstore":
            stats = manager.manager.stats()
            self.counts["blocks from tiers"] += sum(tier.loaded for tier in stats.tiers)
            self.counts["evicted blocks"] += stats.primary.evicted
        else:
            self.counts["bytes from tiers"] += sum(tier.tier.stats().bytes_loaded for tier in manager.secondary_tiers)

    def _count_preemptions(self) -> None:
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts["preemptions"] += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted


def _turns_of(prompt: Prompt, params: SamplingParams, rng: random.Random) -> list[tuple[Prompt, bool, SamplingParams]]:
    """Cut a prompt into the turns of a session.

    Turns before the last have one token of answer, which the next turn replaces. So the last answer is the prompt's.
    """
    tokens = prompt.tokens
    cuts = sorted(rng.sample(range(1, len(tokens)), rng.randrange(1, 4)))
    short = params.clone()
    short.max_tokens = 1
    turns = [(replace(prompt, tokens=tokens[start:end]), True, short) for start, end in pairwise([0, *cuts])]
    last, end = replace(prompt, tokens=tokens[cuts[-1] :]), replace(prompt, tokens=[2])
    return [*turns, (last, True, params), (end, False, params)]
