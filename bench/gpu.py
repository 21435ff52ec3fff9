"""Everything that needs a GPU, in order of worth, each step under a time limit and with files of its own.

- tests and copies of a real GPU
- time to the first token of 2,000 to 64,000 tokens: computed, from CPU memory, and from disk after a restart
- throughput and time per token at a steady load, with offloading and without
- time that a model loses to a tier
- two GPUs together

A step leaves ``NAME.json`` and ``NAME.txt``, its output, in ``--out``. Complete steps are not repeated, and none begins
that may take longer than the minutes that are left, so that several short runs do the work of a long one. The engines
serve a Llama of the shape of Llama 3.1 8B without its vocabulary, with random weights, which is made first.

    python bench/gpu.py [--minutes 40] [--out gpu-results]     (or: make gpu)
    python bench/gpu.py --rehearse      each program on a CPU, with a tiny model and few tokens, in two minutes
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# Add the repository, so that this file runs as a program.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.common import Row, needs, print_table

needs("torch")

import torch

from examples.serving import kill_session

MODEL = (
    "examples/tiny_llama.py {model} --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336"
    " --positions 131072 --dtype bfloat16"
)
TINY = " --layers 2 --hidden 128 --heads 4 --kv-heads 2 --intermediate 128 --positions 8192"
"""Added in a rehearsal: of two arguments with one name the last one counts."""
# Servers that start together on one GPU would miscount each other's memory, so the size of their KV cache is given.
ENGINE = (
    " --dir {work} --model {model} --block-tokens 16"
    " --serve '--dtype bfloat16 --gpu-memory-utilization 0.2 --kv-cache-memory-bytes 10737418240'"
)
TINY_ENGINE = (
    " --runs 1 --cpu-gib 0.1 --block-tokens 32"
    " --serve '--dtype float32 --gpu-memory-utilization 0.1 --kv-cache-memory-bytes 134217728'"
)
KVSTORE = "kvstore-file"
COLUMNS = ("step", "result", "minutes", "found")
_STOP_S = 60.0
"""Time for a step to print its rows and to stop its servers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One program."""

    name: str
    minutes: float  # Its time limit.
    command: str
    found: Callable[[Sequence[Row]], str]  # Its main figures, in a few words.
    rehearsal: str | None  # Arguments that are added in a rehearsal; None: another step rehearses the program.
    gpus: int = 1


def kvstore_over(rows: Sequence[Row], column: str, other: str, *key: str) -> str:
    """Return kvstore's figures over those of another system, for each value of the columns ``key``."""
    values = {(row["system"], *(row[name] for name in key)): row[column] for row in rows}
    cases = [case for system, *case in values if system == KVSTORE]
    return ", ".join(
        f"{' '.join(map(str, case))} {values[KVSTORE, *case] / values[other, *case]:.3f}"
        for case in cases
        if values.get((other, *case))
    )


def ttft(rows: Sequence[Row]) -> str:
    """Return the times to the first token over those of vLLM's tiers."""
    return "TTFT over vLLM's: " + kvstore_over(rows, "ttft_s", "vllm-fs", "op", "prompt_tokens")


def overhead(rows: Sequence[Row]) -> str:
    """Return the throughput and the time per token over those without offloading."""
    shares = ", ".join(f"{row['system']} {row['share']:.3f}" for row in rows if row["system"] != "none")
    return f"of the throughput without: {shares}; TPOT over that without: {kvstore_over(rows, 'tpot_s', 'none')}"


def copies(rows: Sequence[Row]) -> str:
    """Return the rates of copies over that of one plain copy."""
    found = (row for row in rows if row["system"].startswith("kvstore"))
    return "of a plain copy: " + ", ".join(
        f"{row['op']}{' pinned' * row['pinned']}{' huge' * row['huge_pages']} {row['of_plain']:.2f}" for row in found
    )


def lost(rows: Sequence[Row]) -> str:
    """Return the time that the model lost."""
    found = (row for row in rows if row["system"] == KVSTORE)
    return "seconds lost for a GB: " + ", ".join(
        f"{row['op']} {row['block_bytes'] >> 10} KiB {row['lost_s_per_gb']:.3f}" for row in found
    )


def ttft_step(name: str, arguments: str, minutes: float, rehearsal: str | None = None, gpus: int = 1) -> Step:
    """Return a step of bench/vllm_ttft.py."""
    return Step(name, minutes, f"bench/vllm_ttft.py{ENGINE} {arguments}", ttft, rehearsal, gpus)


STEPS = (
    Step("tests", 3, "make test-gpu PYTHON={python}", lambda rows: "", "--dry-run"),
    Step("copies", 2, "bench/cuda_copy.py --no-spin", copies, "--quick --runs 1"),
    ttft_step("ttft-short", "--tokens 2000,8000 --runs 5 --cpu-gib 8", 6, f"--tokens 300{TINY_ENGINE}"),
    ttft_step("ttft-32000", "--tokens 32000 --runs 3 --cpu-gib 18", 6),
    Step(
        "overhead",
        9,
        f"bench/vllm_overhead.py{ENGINE} --serve '--max-num-seqs 16' --clients 16 --prompts 64 --output-tokens 128"
        " --starts 2 --runs 3 --cpu-gib 16",
        overhead,
        f"--starts 1 --tokens 100 --prompts 4 --output-tokens 4{TINY_ENGINE}",
    ),
    # Two prompts of 8.4 GB, as a disk of 64 GiB has to hold them twice, beside the model.
    ttft_step("ttft-64000", "--tokens 64000 --runs 2 --cpu-gib 18", 8),
    Step(
        "model-loses",
        4,
        "bench/engine_thread.py --directory {work} --runs 3 --systems kvstore-file kvstore-file-thread vllm-fs",
        lost,
        "--quick --runs 1 --sizes 2048 --systems kvstore-file",
    ),
    ttft_step("tensor-parallel", "--tokens 8000 --runs 5 --cpu-gib 8 --serve '--tensor-parallel-size 2'", 6, gpus=2),
)


class Options(NamedTuple):
    """How to run the steps."""

    out: Path
    is_rehearsal: bool
    serve: str  # Further arguments of `vllm serve`.

    def command(self, text: str, rehearsal: str | None) -> list[str]:
        """Return the command of a step or of the model."""
        work, python = self.out / "work", sys.executable
        if ENGINE in text and self.serve:
            text += f" --serve {shlex.quote(self.serve)}"
        text += f" {rehearsal}" * self.is_rehearsal
        words = [word.format(work=work, model=work / "model", python=python) for word in shlex.split(text)]
        if words[0] == "make":
            return words
        # In a rehearsal vLLM is imported once, not by each engine.
        before = ["-m", "tests.vllm.preloaded"] if self.is_rehearsal and "vllm" in words[0] else []
        return [python, *before, *words]


def run(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run a command; return its status, or None if it was stopped at its limit, after which it prints its rows."""
    # Killed servers leave sockets among the temporary files.
    temporary = tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True)
    with temporary as name, log.open("w") as output:
        program = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": name},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return program.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if program.poll() is None:
                program.terminate()
                try:
                    program.wait(_STOP_S)
                finally:
                    kill_session(program)


def measure(step: Step, options: Options, limit_s: float) -> dict[str, Any]:
    """Run a step, and write its files; return its report."""
    work, report = options.out / "work", options.out / f"{step.name}.json"
    log, started = report.with_suffix(".txt"), time.monotonic()
    command = options.command(step.command, step.rehearsal)
    status: int | None = 0
    if str(work / "model") in command and not (work / "model" / "tokenizer_config.json").exists():
        status = run(options.command(MODEL, TINY), log, limit_s)
    if status == 0:
        json_option = [] if command[0] == "make" else ["--json", str(report)]
        status = run([*command, *json_option], log, max(1.0, limit_s - (time.monotonic() - started)))
    seconds = time.monotonic() - started
    found = json.loads(report.read_text()) if report.exists() else {"complete": status == 0, "rows": []}
    found |= {"step": step.name, "command": shlex.join(command), "status": status, "seconds": round(seconds, 1)}
    report.write_text(json.dumps(found, indent=1) + "\n")
    return found


def row_of(step: Step, report: dict[str, Any], log: Path) -> Row:
    """Return a step's row of the closing table."""
    lines = log.read_text().splitlines() or [""]
    errors = [line for line in lines if "Error" in line] or lines
    result = {0: "ok", None: "cut"}.get(report["status"], f"status {report['status']}")
    figures = step.found(report["rows"]) if report["rows"] else (errors if report["status"] else lines)[-1][:120]
    return {"step": step.name, "result": result, "minutes": report["seconds"] / 60, "found": figures}


def of_step(step: Step, options: Options, end: float) -> Row:
    """Run a step if it isn't complete and can end before a time; return its row of the closing table."""
    gpus, file = torch.cuda.device_count(), options.out / f"{step.name}.json"
    if step.gpus > gpus and not options.is_rehearsal:
        return {"step": step.name, "result": "left out", "found": f"needs {step.gpus} GPUs, not {gpus}"}
    report = json.loads(file.read_text()) if file.exists() else {}
    if not report.get("complete"):
        if step.minutes * 60 > end - time.monotonic():
            return {"step": step.name, "result": "not begun", "found": f"may take {step.minutes} minutes"}
        print(f"{step.name}: at most {step.minutes} minutes", file=sys.stderr, flush=True)
        report = measure(step, options, step.minutes * 60)
    return row_of(step, report, file.with_suffix(".txt"))


def main() -> int:
    """Run the steps and print the closing table; returns 0 if each was complete and right, or needs more GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40, help="most time for all steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="for results (default: %(default)s)")
    parser.add_argument("--serve", default="", help="further arguments of `vllm serve`, in quotes")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in a directory that is removed")
    arguments = parser.parse_args()
    # Ends the running step, too, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("No CUDA device here (torch.cuda.is_available() is false). Try --rehearse.")
    end = time.monotonic() + arguments.minutes * 60
    with ExitStack() as stack:
        if arguments.rehearse:
            arguments.out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-gpu-")))
        options = Options(arguments.out.resolve(), arguments.rehearse, arguments.serve)
        (options.out / "work").mkdir(parents=True, exist_ok=True)
        rows = [of_step(step, options, end) for step in STEPS if not options.is_rehearsal or step.rehearsal]
    print_table(rows, COLUMNS)
    return 0 if all(row["result"] in ("ok", "left out") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
