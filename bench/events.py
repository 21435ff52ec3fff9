"""Scheduler cost of KV cache events at 100,000 blocks, and the time of their report after a start.

A disk tier with the seal ``aead`` is filled with blocks of prompts and their lineage. Then real engines start on it.

- ``report``: seconds from the first to the last event of the tier, in the event stream of an idle engine.
- ``step``: CPU microseconds per step in ``schedule`` and ``update_from_output``, for requests without prefix reuse, of
  three engines in turns: without events; with events of vLLM's own blocks only (``vllm events``); and with kvstore's
  events as well (``all events``). ``share`` is the median ratio to the previous engine over the starts, and ``low`` and
  ``high`` are the ends of its 95 % interval.
- ``take_events``: CPU microseconds per step in kvstore's own code. The rest of the difference is vLLM's conversion of
  the blocks that kvstore reports.
- ``bytecodes``: Python bytecodes per step on the scheduler's thread, in kvstore's code for events (``kvstore events``)
  and elsewhere. They do not depend on the load of the machine. ``share`` is the ratio of kvstore's events to everything
  else; the goal is at most 0.02.

    python bench/events.py [--quick] [--blocks N] [--starts N] [--steps N] [--json FILE]

Needs vLLM on the CPU platform, and the extra ``aead``. Takes about four minutes per start on two cores, and 12 KiB of
disk per block.
"""

from __future__ import annotations

import argparse
import base64
import json
import mmap
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Add the repository, so that this file runs as a program.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec

from bench.common import Row, arguments, end_with_parent, median_interval, needs, reporting

needs("cryptography", "torch", "transformers", "vllm", "zmq")

import zmq

from examples.tiny_llama import LlamaShape, make_tiny_llama
from kvstore.namespace import Namespace
from kvstore.tiers import open_tier
from kvstore.types import TransferJob

BLOCK_TOKENS = 32
PROMPT_BLOCKS = 50
JOB = 64
EVENT_MODULES = ("kvstore/tiers/inventory.py", "kvstore/tiering/events.py", "kvstore/vllm/events.py")
SYSTEMS = ("without", "vllm events", "all events")
COLUMNS = ("op", "system", "blocks", "seconds", "us_per_call", "per_step", "share", "low", "high", "runs")


def main() -> None:
    """Fill the tier, start the engines, measure."""
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="timed steps of each engine; half as many are counted")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        run_child(args.child)
        return
    blocks, starts = (5_000, 1) if args.quick else (args.blocks, args.starts)
    with reporting(args, COLUMNS) as rows, tempfile.TemporaryDirectory(prefix="kvstore-events-") as name:
        rows += measure(Path(name), blocks, starts, args.steps)


def measure(work: Path, blocks: int, starts: int, timed: int) -> list[Row]:
    """Return the rows."""
    model = make_tiny_llama(work / "model", LlamaShape(layers=1, hidden=64, heads=2, kv_heads=1))
    ring = {"current": 1, "keys": {"1": base64.b64encode(secrets.token_bytes(32)).decode()}}
    keys = work / "keys.json"
    keys.touch(0o600)
    keys.write_text(json.dumps(ring))
    tier = {
        "type": "file",
        "path": str(work / "kv"),
        "capacity": f"{(blocks + 20_000) * 12}KiB",
        "codec": [{"aead": {"keys": {"file": str(keys)}}}],
    }
    known = child(work, model, tier, "describe")
    shutil.rmtree(work / "kv")
    child(work, model, tier, "fill", blocks=blocks, known=known)
    reports: list[float] = []
    steps: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    own: list[float] = []
    counts: list[tuple[float, float]] = []
    for start in range(starts):
        reports.append(report(work, model, tier, blocks))
        for system in SYSTEMS[:: -1 if start % 2 else 1]:
            found = child(work, model, tier, "steps", system=system, seed=start, steps=timed)
            steps[system].append(found["us"])
            if system == "all events":
                own.append(found["own_us"])
                counts.append((found["event_bytecodes"], found["other_bytecodes"]))
    common: dict[str, Any] = {"bench": "events", "blocks": blocks, "runs": starts}
    rows: list[Row] = [{**common, "op": "report", "system": "kvstore-file", "seconds": statistics.median(reports)}]
    for system, before in zip(SYSTEMS, (None, *SYSTEMS), strict=False):
        row: Row = {**common, "op": "step", "system": system, "us_per_call": statistics.median(steps[system])}
        if before is not None:
            shares = [on / off for on, off in zip(steps[system], steps[before], strict=True)]
            low, high = median_interval(shares)
            row |= {"share": statistics.median(shares), "low": low, "high": high}
        rows.append(row)
    rows.append({**common, "op": "take_events", "system": "all events", "us_per_call": statistics.median(own)})
    events, others = (statistics.median(column) for column in zip(*counts, strict=True))
    counted = {**common, "op": "bytecodes"}
    rows.append({**counted, "system": "kvstore events", "per_step": events, "share": events / others})
    return [*rows, {**counted, "system": "all else", "per_step": others}]


def fill(tier: dict[str, Any], blocks: int, known: dict[str, Any]) -> None:
    """Store blocks of prompts, and their lineage."""
    slot_bytes = known["slot_bytes"]
    memory = mmap.mmap(-1, slot_bytes * JOB)
    opened = open_tier(tier, primary=memory, slot_bytes=slot_bytes, namespace=Namespace(known["fields"]))
    parent = b""
    for job, start in enumerate(range(0, blocks, JOB)):
        keys = [secrets.token_bytes(32) for _ in range(min(JOB, blocks - start))]
        named = [key + bytes(4) for key in keys]
        opened.submit_store(TransferJob(job, named, list(range(len(named)))))
        results: list[Any] = []
        while not results:
            results = list(opened.get_finished())
            time.sleep(0.0002)
        assert results[0].success, opened.stats().last_error
        lineage, hidden = [], []
        for place, key in enumerate(keys, start):
            lineage.append(msgspec.msgpack.encode([parent if place % PROMPT_BLOCKS else b"", BLOCK_TOKENS, []]))
            hidden.append(msgspec.msgpack.encode([secrets.token_bytes(2 * BLOCK_TOKENS) * 2, None]))
            parent = key
        opened.keep_lineage(named, lineage, hidden)
        opened.flush()
    opened.drain(60)
    opened.close(60)
    memory.close()


def report(work: Path, model: Path, tier: dict[str, Any], blocks: int) -> float:
    """Return the seconds between the first and the last block that an idle engine reports.

    The report begins as soon as the stream does, so a subscriber could miss it. vLLM repeats its messages on request.
    """
    endpoint = f"ipc://{work}/repeats"
    process = start_child(work, model, tier, "serve", system="all events", repeats=endpoint)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    held: set[int] = set()
    times: list[float] = []
    following = 0
    deadline = time.monotonic() + 300
    try:
        while len(held) < blocks:
            time.sleep(0.5)
            socket.send_multipart([b"", following.to_bytes(8, "big")])
            is_answered = False
            while not is_answered:
                is_alive = process.poll() is None and time.monotonic() < deadline
                assert is_alive, f"{len(held)} of {blocks} blocks reported"
                is_answered = bool(socket.poll(1000))
            while (message := socket.recv_multipart())[-1]:
                sent_at, events, *_ = msgspec.msgpack.decode(message[-1])
                following = int.from_bytes(message[-2], "big") + 1
                for event in events:
                    if event["medium"] == "STORAGE" and event["type"] == "BlockStored":
                        assert len(event["token_ids"]) == BLOCK_TOKENS, "with its tokens"
                        times.append(sent_at)
                        held.update(event["block_hashes"])
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(60)
        context.destroy(linger=0)
    return times[-1] - times[0]


def start_child(work: Path, model: Path, tier: dict[str, Any], task: str, **more: Any) -> subprocess.Popen[str]:
    """Start a task in a process of its own."""
    text = json.dumps({"model": str(model), "tier": tier, "task": task, **more})
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if task == "serve" else "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        # vLLM leaves files and sockets in both.
        "TMPDIR": str(work),
        "VLLM_RPC_BASE_PATH": str(work),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    log = (work / "engine.log").open("ab")
    with log:
        return subprocess.Popen(
            [sys.executable, __file__, "--child", text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        )


def child(work: Path, model: Path, tier: dict[str, Any], task: str, **more: Any) -> dict[str, Any]:
    """Run a task in a process of its own; return its result."""
    process = start_child(work, model, tier, task, **more)
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"An engine failed. The end of its log:\n{(work / 'engine.log').read_text()[-4000:]}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def run_child(options: dict[str, Any]) -> None:
    """Fill the tier or run an engine: the main program of a child process."""
    end_with_parent()
    if options["task"] == "fill":
        fill(options["tier"], options["blocks"], options["known"])
        print("{}")
        return
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    extra: dict[str, Any] = {}
    system = options.get("system", "without")
    if system != "without":
        extra["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"ipc://{tempfile.gettempdir()}/events",
            replay_endpoint=options.get("repeats"),
        )
    if system == "vllm events":
        from kvstore.vllm import manager as own_manager

        own_manager.emits_events = lambda spec: False
    llm = LLM(
        options["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=128 * 2**20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "KVStoreOffloadingSpec",
                "spec_module_path": "kvstore.vllm",
                "manager": "kvstore",
                "cpu_bytes_to_use": 64 * 2**20,
                "self_describing_kv_events": True,
                "secondary_tiers": [options["tier"]],
            },
        ),
        **extra,
    )
    if options["task"] == "serve":
        sys.stdin.read()
        # At the end of a program vLLM kills an engine after 5 s, and leaves its shared memory.
        llm.llm_engine.engine_core.shutdown(timeout=50)
        return
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.connector.connector_scheduler.manager
    if options["task"] == "describe":
        [document] = [json.loads(path.read_text()) for path in Path(options["tier"]["path"]).rglob("namespace.json")]
        print(json.dumps({"fields": document["fields"], "slot_bytes": manager.manager.primary.slot_bytes}))
        return
    settle(llm, scheduler, manager)
    choose = random.Random(options["seed"])
    found = timed_steps(llm, scheduler, manager, choose, options["steps"])
    if system == "all events":
        found |= counted_steps(llm, scheduler, choose, options["steps"] // 2)
    print(json.dumps(found))


def timed_steps(llm: Any, scheduler: Any, manager: Any, choose: random.Random, least: int) -> dict[str, float]:
    """Return microseconds per step, of the scheduler and of kvstore's events."""
    spent: list[float] = []
    own: list[float] = []

    def timed(function: Any, times: list[float]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = function(*args, **kwargs)
            times[-1] += time.thread_time() - started
            return result

        return call

    def begin(*args: Any, **kwargs: Any) -> Any:
        spent.append(0.0)
        own.append(0.0)
        return schedule(*args, **kwargs)

    originals = scheduler.schedule, scheduler.update_from_output, manager.take_events
    schedule = timed(originals[0], spent)
    scheduler.schedule, scheduler.update_from_output = begin, timed(originals[1], spent)
    manager.take_events = timed(originals[2], own)
    while len(spent) < least:
        generate(llm, choose)
    scheduler.schedule, scheduler.update_from_output, manager.take_events = originals
    return {"us": 1e6 * sum(spent) / len(spent), "own_us": 1e6 * sum(own) / len(own)}


def counted_steps(llm: Any, scheduler: Any, choose: random.Random, least: int) -> dict[str, float]:
    """Return the scheduler's bytecodes per step, in kvstore's code for events and elsewhere."""
    steps = of_events = others = 0
    taking = False

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal of_events, others, taking
        code = frame.f_code
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            taking = taking or is_taking(code)
        elif event == "return" and is_taking(code):
            taking = False
        elif event == "opcode" and (taking or code.co_filename.endswith(EVENT_MODULES)):
            of_events += 1
        elif event == "opcode":
            others += 1
        return count

    def is_taking(code: Any) -> bool:
        return bool(code.co_name == "take_events" and code.co_filename.endswith("kvstore/vllm/manager.py"))

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sys.settrace(count)
            try:
                return function(*args, **kwargs)
            finally:
                sys.settrace(None)

        return call

    def begin(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        return schedule(*args, **kwargs)

    schedule, update = counted(scheduler.schedule), counted(scheduler.update_from_output)
    scheduler.schedule, scheduler.update_from_output = begin, update
    while steps < least:
        generate(llm, choose)
    return {"event_bytecodes": of_events / steps, "other_bytecodes": others / steps}


def generate(llm: Any, choose: random.Random) -> None:
    """Generate answers to eight new random prompts."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [choose.randrange(2, 512) for _ in range(400)]} for _ in range(8)]
    llm.generate(prompts, sampling, use_tqdm=False)


def settle(llm: Any, scheduler: Any, manager: Any) -> None:
    """Step until recovery is complete and no request remains."""
    core = llm.llm_engine.engine_core.engine_core
    while scheduler.has_requests() or any(stats.recovering for stats in manager.manager.tier_stats()):
        for tier in manager.manager.tiers:
            tier.wait_recovered(1)
        core.step()


if __name__ == "__main__":
    main()
