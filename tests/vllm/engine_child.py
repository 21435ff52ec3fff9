"""Real vLLMs, each in its own process, controlled by JSON lines over a socket; see engines.py.

python engine_child.py FD

This process imports vLLM once, and forks an engine for each message on the socket FD. A fork copies one thread only, so
where the import starts others, as it does with a GPU, each engine is a program of its own: engine_child.py FD OUTPUT.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from tests.vllm.preloaded import fork_engines, import_vllm

STEP_S = 0.04
"""Minimum duration of a scheduler step while steps are counted, as on a GPU: I/O of a few blocks then ends within
one step, so the number of steps shows how often the scheduler had to retry."""


class Engine:
    """The engine and the calls that tests make."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        extra: dict[str, Any] = {}
        if options["offloading"] is not None:
            _load_always(options["offloading"])
            extra["kv_transfer_config"] = KVTransferConfig(
                kv_connector="MultiConnector" if "connectors" in options["offloading"] else "KVStoreConnector",
                **{"kv_role": "kv_both", **options["transfer"]},
                engine_id=options["engine_id"],
                kv_connector_extra_config=options["offloading"],
            )
        if options["events"]:
            wanted = options["events"] if isinstance(options["events"], dict) else {"publisher": "null"}
            extra["kv_events_config"] = KVEventsConfig(**{"enable_kv_cache_events": True, **wanted})
        common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 8, "block_size": 32}
        common |= {"disable_log_stats": False, "kv_cache_memory_bytes": 128 * 2**20}
        extra = {**common, **extra, **options["llm"]}
        if "mamba" in Path(options["model"], "config.json").read_text():
            from tests.vllm.walk.engine import mend_vllm

            mend_vllm(speculates=False)
        self.llm = LLM(options["model"], **extra)

    def ask(
        self,
        prompts: list[list[int]],
        max_tokens: int = 6,
        policy: dict[str, Any] | None = None,
        named: dict[str, Any] | None = None,
        salt: str | None = None,
        adapter: list[Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Answer prompts in one batch, with an offload policy, other transfer parameters, a cache salt and a LoRA."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = {**({"kvstore": policy} if policy is not None else {}), **(named or {})}
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra)
        salted = {"cache_salt": salt} if salt else {}
        inputs = [{"prompt_token_ids": prompt, **salted} for prompt in prompts]
        lora = None if adapter is None else LoRARequest(*adapter)
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        return [
            {
                "tokens": list(o.outputs[0].token_ids),
                "cached": o.num_cached_tokens,
                **{name: value for name, value in (o.kv_transfer_params or {}).items() if name == "kvstore_account"},
            }
            for o in outputs
        ]

    def ask_mixed(self, prompt: list[int], is_token: list[bool]) -> dict[str, Any]:
        """Answer a prompt of tokens and, in their places where ``is_token`` is false, fixed random embeddings."""
        import torch
        from vllm import SamplingParams

        hidden = self.llm.llm_engine.model_config.get_hidden_size()
        rows = torch.randn(len(prompt), hidden, generator=torch.Generator().manual_seed(1)) / 2
        mixed: Any = {"prompt_embeds": rows, "prompt_token_ids": prompt, "prompt_is_token_ids": is_token}
        sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        (output,) = self.llm.generate([mixed], sampling, use_tqdm=False)
        return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}

    def ask_hinted(self, prompt: list[int], payload: dict[str, Any]) -> None:
        """Answer a prompt with a hint for kvstore, as an orchestrator passes it."""
        from vllm import SamplingParams
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        hints = KvHintsEnvelope("1", "message", [KvHintAction("action", "kvstore", "1", payload)])
        sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        engine = self.llm.llm_engine
        engine.add_request("hinted", {"prompt_token_ids": prompt}, sampling, kv_hints=hints)
        while engine.has_unfinished_requests():
            engine.step()

    def session(self, turns: list[list[int]], others: list[list[int]], tokens: int, aborted: bool) -> list[list[int]]:
        """Answer the turns of a streaming-input session, beside another prompt in each; ``aborted``: not ended."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, core = self.llm.llm_engine, self.llm.llm_engine.engine_core
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

        def add(name: str, prompt: list[int], *, resumable: bool) -> None:
            request = engine.input_processor.process_inputs(
                name,
                {"prompt_token_ids": prompt},
                sampling,
                resumable=resumable,
                **({"supported_tasks": engine.get_supported_tasks()} if "supported_tasks" in accepted else {}),
            )
            request.external_req_id = request.external_req_id or name
            core.add_request(request)

        accepted = inspect.signature(engine.input_processor.process_inputs).parameters
        answers: list[list[int]] = []
        deadline = time.monotonic() + 90
        for number, turn in enumerate(turns):
            answers.append(answer := [])
            add("session", turn, resumable=True)
            for prompt in others[number : number + 1]:
                add(f"beside-{number}", prompt, resumable=False)
            while len(answer) < tokens or self._core().scheduler.has_unfinished_requests():
                assert time.monotonic() < deadline, "the turn did not end"
                for output in core.get_output().outputs:
                    if output.request_id == "session":
                        answer += output.new_token_ids
        if aborted:
            self._core().abort_requests(["session"])
        else:
            add("session", [0], resumable=False)
        for _ in range(10):
            core.get_output()
        self.settle()
        scheduler = self._core().scheduler
        assert not scheduler.requests, "a request is left"
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1, "a block of the device is left"
        return answers

    def ask_with_resets(self, prompts: list[list[int]], tokens: int, running: bool, connector: bool) -> list[list[int]]:
        """Answer prompts, with a reset once all have tokens and no copy runs. The second begins late in the first.

        Args:
            prompts: The device has room for all of them.
            tokens: Length of each answer.
            running: Whether the reset lets running requests begin anew.
            connector: Whether the reset includes the connector.
        """
        from vllm import SamplingParams

        engine, scheduler = self.llm.llm_engine, self._core().scheduler
        jobs = scheduler.connector.connector_scheduler._jobs if scheduler.connector else {}
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        waiting = list(enumerate(prompts))
        answers: dict[str, list[int]] = {}
        is_reset = False
        while waiting or engine.has_unfinished_requests():
            if waiting and len(answers.get("0", ())) >= (0 if len(waiting) == len(prompts) else 2 * tokens // 3):
                number, prompt = waiting.pop(0)
                engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
            answers.update((output.request_id, list(output.outputs[0].token_ids)) for output in engine.step())
            time.sleep(0.002)  # For the I/O, which needs the cores, too.
            if not is_reset and len(answers) == len(prompts) == len(scheduler.running) and not jobs:
                engine.reset_prefix_cache(running, connector)
                is_reset = True
        assert is_reset, "the answers are too short for a reset"
        return [answers[str(number)] for number in range(len(prompts))]

    def ask_beside_late_loads(self, prompts: list[list[int]], late: list[int]) -> int:
        """Answer each prompt with one token, and a late load of another connector that takes over its blocks.

        Returns the number of late loads.
        """
        from vllm import SamplingParams

        from tests.vllm.late_connector import LateConnector

        def sampling(tokens: int, **extra: Any) -> SamplingParams:
            return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **extra)

        engine, params = self.llm.llm_engine, {"kv_transfer_params": {"late": True}}
        for number, prompt in enumerate(prompts):
            engine.add_request(f"stored-{number}", {"prompt_token_ids": prompt}, sampling(1))
            salted: Any = {"prompt_token_ids": late, "cache_salt": str(number)}
            engine.add_request(f"late-{number}", salted, sampling(4, extra_args=params))
            while engine.has_unfinished_requests():
                engine.step()
            self.settle()
        return LateConnector.promised

    def ask_losing_loads(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """Answer prompts at once, while each block promised for every other load is lost before the load."""
        manager = self._core().scheduler.connector.connector_scheduler.manager.manager
        prepare_load, loads = manager.prepare_load, 0

        def lost(keys: Any, context: Any) -> Any:
            nonlocal loads
            loads += 1
            return None if loads % 2 else prepare_load(keys, context)

        manager.prepare_load = lost
        try:
            return [{**answer, "loads": loads} for answer in self.ask(prompts, tokens)]
        finally:
            manager.prepare_load = prepare_load

    def embed(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Return the embeddings of prompts."""
        outputs = self.llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        return [{"numbers": o.outputs.embedding, "cached": o.num_cached_tokens} for o in outputs]

    def beams(self, prompts: list[list[int]], width: int, tokens: int) -> list[list[list[int]]]:
        """Return the tokens of the best beams of each prompt, with the prompt's."""
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [[list(sequence.tokens) for sequence in output.sequences] for output in outputs]

    def preempt_and_abort(self, prompts: list[list[int]], times: int) -> None:
        """Add prompts over and over, and abort each request that is preempted, until so many were."""
        from vllm import SamplingParams

        engine, scheduler, preempted = self.llm.llm_engine, self._core().scheduler, []
        preempt = scheduler._preempt_request

        def noted(request: Any, *args: Any, **more: Any) -> None:
            preempt(request, *args, **more)
            preempted.append(request.request_id)

        scheduler._preempt_request = noted
        sampling, count = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), 0
        deadline, ended = time.monotonic() + 200, 0
        while ended < times:
            assert time.monotonic() < deadline, f"{ended} requests were preempted"
            while engine.get_num_unfinished_requests() < 8:
                count += 1
                engine.add_request(f"many-{count}", {"prompt_token_ids": prompts[count % len(prompts)]}, sampling)
            engine.step()
            aborted, preempted[:] = list(preempted), []
            engine.abort_request(aborted, internal=True)
            ended += len(set(aborted))
        scheduler._preempt_request = preempt
        engine.abort_request(list(scheduler.requests), internal=True)
        self.settle()
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1, "a block of the device is left"

    def ask_ending_preempted(self, ending: list[list[int]], others: list[list[int]]) -> list[list[int]]:
        """Answer prompts with two tokens. Each of ``ending`` is preempted while its last token is under way.

        Its blocks are stored only once it has ended. Then one of ``others`` has taken them over. Returns the texts.
        """
        from vllm import SamplingParams

        engine, core = self.llm.llm_engine, self._core()
        scheduler = core.scheduler
        # As on a GPU, a step is scheduled while the one before it runs.
        core.batch_queue_size, core.batch_queue, core.step_fn = 2, deque(maxlen=2), core.step_with_batch_queue
        schedule, manager = scheduler.schedule, scheduler.connector.connector_scheduler.manager
        prepare_store, texts, ended = manager.prepare_store, {}, 0

        def schedule_after_preemption(*args: Any, **more: Any) -> Any:
            nonlocal ended
            for request in list(scheduler.running):
                if (
                    request.request_id.startswith("ending")
                    and request.num_in_flight_tokens
                    and request.num_output_tokens
                ):
                    scheduler.running.remove(request)
                    scheduler._preempt_request(request, time.monotonic())
                    ended += 1
            return schedule(*args, **more)

        def prepare_late(keys: Any, context: Any) -> Any:
            runs = context.req_id.startswith("ending") and context.req_id in scheduler.requests
            return None if runs else prepare_store(keys, context)

        scheduler.schedule, manager.prepare_store = schedule_after_preemption, prepare_late
        sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        for number, (first, second) in enumerate(zip(ending, others, strict=True)):
            engine.add_request(f"ending-{number}", {"prompt_token_ids": first}, sampling)
            answers = [*engine.step(), *engine.step()]
            engine.add_request(f"other-{number}", {"prompt_token_ids": second}, sampling)
            while engine.has_unfinished_requests():
                answers += engine.step()
            texts.update((each.request_id, each.prompt_token_ids + list(each.outputs[0].token_ids)) for each in answers)
            self.settle()
        scheduler.schedule, manager.prepare_store = schedule, prepare_store
        assert ended == len(ending)
        return list(texts.values())

    def certain(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Answer prompts, each up to its first near tie, after which the batch may change the tokens."""
        from tests.vllm.walk.answers import certain_answers

        return certain_answers(self.llm, [{"prompt_token_ids": prompt} for prompt in prompts], tokens)

    def steps(self, prompt: list[int]) -> dict[str, Any]:
        """Answer a prompt with one token, and count the scheduler's steps."""
        scheduler = self._core().scheduler
        schedule, count = scheduler.schedule, 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            time.sleep(STEP_S)
            return schedule(*args, **kwargs)

        scheduler.schedule = counted
        try:
            (answer,) = self.ask([prompt], max_tokens=1)
        finally:
            scheduler.schedule = schedule
        return {**answer, "steps": count}

    def settle(self) -> None:
        """Step until all stores have ended; only if the engine runs in this process."""
        core, deadline = self._core(), time.monotonic() + 90
        while core.scheduler.has_requests():
            assert time.monotonic() < deadline, "stores did not end"
            self.llm.llm_engine.step()
            time.sleep(0.005)  # For the I/O, which needs the cores, too.

    def watch(self) -> None:
        """Note the numbers of each block from now on; the engine's spec is ``WatchedSpec``."""
        from tests.vllm.walk.blocks import WatchedSpec

        self.seen: list[Any] = []
        WatchedSpec.seen = self.seen.append

    def judge(self, texts: list[list[int]]) -> dict[str, Any]:
        """Compare the noted blocks with those that the engine now computes for texts; return counts, and wrong ones."""
        from tests.vllm.walk.blocks import BlockOracle, WatchedSpec, recording

        self.settle()
        self.reset()
        oracle = BlockOracle()
        oracle.expected.append({})
        WatchedSpec.seen = recording(oracle.expected[0])
        for text in texts:
            self.ask([text], 1, {"load": False})
            self.settle()
            self.forget_device()
        for seen in self.seen:
            oracle.judge(seen)
        return {"wrong": oracle.wrong, **oracle.counts}

    def reset(self) -> None:
        """Empty vLLM's own caches, in device and host memory; the tiers follow their option ``reset``."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def change_weights(self) -> None:
        """Change the weights of all layers in place, as a trainer does."""
        import torch

        def change(model: Any) -> None:
            torch.manual_seed(1)
            for name, parameter in model.named_parameters():
                if "layers" in name:
                    parameter.data += 0.05 * torch.randn_like(parameter)

        self.llm.apply_model(change)

    def forget_device(self) -> None:
        """Empty vLLM's cache in device memory."""
        assert self.llm.reset_prefix_cache()

    def metrics(self) -> dict[str, float]:
        """Return our metrics, as Prometheus would scrape them, by name and labels."""
        from vllm.v1.metrics.reader import Counter, Gauge

        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:kvstore_") and isinstance(metric, Counter | Gauge):
                labels = ",".join(v for k, v in sorted(metric.labels.items()) if k not in {"model_name", "engine"})
                found[f"{metric.name}{{{labels}}}"] = metric.value
        return found

    def scrape(self) -> str:
        """Return all metrics, as Prometheus would scrape them."""
        from prometheus_client import generate_latest

        return generate_latest().decode()

    def groups(self) -> int:
        """Return the number of layer groups with separate blocks."""
        return len(self._core().scheduler.kv_cache_config.kv_cache_groups)

    def tier_errors(self) -> int:
        """Return the number of errors caught by the tiers or by kvstore's own manager at their interface."""
        manager = self._core().scheduler.connector.connector_scheduler.manager
        return sum(edge.errors.count for edge in getattr(manager, "secondary_tiers", [manager]))

    def manager_stats(self) -> dict[str, Any]:
        """Return the statistics of kvstore's own manager."""
        from dataclasses import asdict

        return asdict(self._core().scheduler.connector.connector_scheduler.manager.manager.stats())

    def backend_counters(self) -> dict[str, int]:
        """Return the counters of the backend of the first tier under kvstore's manager."""
        manager = self._core().scheduler.connector.connector_scheduler.manager
        return dict(manager.manager.tiers[0].stats().backend_counters)

    def epochs(self) -> list[str]:
        """Wait until every tier of kvstore is in an epoch and has recovered; return the epochs' names."""
        manager = self._core().scheduler.connector.connector_scheduler.manager
        tiers = [tier.tier for tier in getattr(manager, "secondary_tiers", [])] or list(manager.manager.tiers)
        assert all(tier.wait_recovered(90) for tier in tiers), "an epoch did not begin"
        return [tier.stats().epoch for tier in tiers]

    def waiting_requests(self, prompts: list[list[int]]) -> list[int]:
        """Answer prompts; return the number of waiting requests in kvstore's manager, before and after each step."""
        from vllm import SamplingParams

        engine, sampling = self.llm.llm_engine, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        waiting = self._core().scheduler.connector.connector_scheduler.manager.manager._requests.waiting
        for number, prompt in enumerate(prompts):
            engine.add_request(f"waiting-{number}", {"prompt_token_ids": prompt}, sampling)
        counts = [len(waiting)]
        while engine.has_unfinished_requests():
            engine.step()
            counts.append(len(waiting))
        return counts

    def let_loads_end(self) -> None:
        """Let the loads of ``SlowMemory`` end."""
        from tests.vllm.slow_medium import LOADS_END

        LOADS_END.set()

    def known_blocks(self, least: int = 0) -> list[int]:
        """Wait until every tier of kvstore's manager lists at least this many blocks; return the numbers."""
        tiers = self._core().scheduler.connector.connector_scheduler.manager.manager.tiers
        deadline = time.monotonic() + 90
        while min(known := [len(tier._presence) for tier in tiers]) < least:
            assert time.monotonic() < deadline, f"the blocks {known} are too few"
            assert all(tier.drain(10) for tier in tiers)
        return known

    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core


def _load_always(offloading: dict[str, Any]) -> None:
    """Turn the gate off unless a test sets it, because the tests count loaded blocks, and tiny models compute fast."""
    if offloading.get("spec_name") == "KVStoreOffloadingSpec" and offloading.get("manager") != "vllm":
        offloading["tiering"] = {"gate": False, **offloading.get("tiering", {})}


def main() -> None:
    """Fork an engine for each message, which has its socket and its output, until the other side closes."""
    # Registered first, so it runs last: to free all objects one by one takes two seconds.
    atexit.register(lambda: os._exit(0))
    if len(sys.argv) == 3:
        return serve(*map(int, sys.argv[1:]))
    control = socket.socket(fileno=int(sys.argv[1]))
    import_vllm()
    threads = len(os.listdir("/proc/self/task"))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The other side waits for engines.
    while descriptors := socket.recv_fds(control, 1, 2)[1]:
        if threads > 1:
            subprocess.Popen([sys.executable, __file__, *map(str, descriptors)], pass_fds=descriptors)
        elif os.fork() == 0:
            control.close()
            fork_engines()
            return serve(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def serve(socket_descriptor: int, output: int) -> None:
    """Be an engine: lead a session, report the process, and serve calls until the other side closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    side, pid = socket.socket(fileno=socket_descriptor), os.getpid()
    process = os.pidfd_open(pid)
    socket.send_fds(side, [b"%8d" % pid], [process])
    os.close(process)
    channel = side.makefile("rw")
    options = json.loads(channel.readline())
    os.environ.clear()
    os.environ.update(options["environment"])
    tempfile.tempdir = None  # It follows the environment.
    # At an engine's end vLLM would examine all objects of its imports twice, half a second each.
    gc.unfreeze = lambda: None
    try:
        engine = Engine(options)
    except BaseException as error:
        channel.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        channel.flush()
        raise
    channel.write(json.dumps({"result": "ready"}) + "\n")
    channel.flush()
    for line in channel:
        name, args = json.loads(line)
        channel.write(json.dumps({"result": getattr(engine, name)(*args)}) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
