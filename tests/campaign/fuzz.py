"""Fuzz one parser: coverage-guided with Atheris where it can be imported, by random mutations elsewhere.

    python -m tests.campaign.fuzz TARGET [--seconds N] [--seed S] [--input FILE] ...

Atheris is no dependency: ``pip install --target /tmp/fuzz atheris`` and PYTHONPATH=/tmp/fuzz. The properties of the
targets stand in ``targets.py``. The last line of output has the number of executions; the exit status is not 0 for a
finding, which ``--input`` repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEMORY_BYTES = 6 << 30
"""Addresses of the process (most of them libraries): what asks for gigabytes because an input says so fails."""

TIME_LIMIT_S = 20
"""Of one input; the machine may be busy."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="directory that inputs which cover more are kept in")
    parser.add_argument("--artifacts", default=".", help="directory that the input of a finding is written to")
    parser.add_argument("--input", type=Path, help="try this file only")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        atheris = None
    # Instrumented as it is imported, so nothing of kvstore may be imported before.
    instrumented = atheris.instrument_imports(include=["kvstore"]) if atheris else contextlib.nullcontext()
    with instrumented:
        target = importlib.import_module("tests.campaign.targets").TARGETS[args.target]
    if args.input:
        target.run(args.input.read_bytes())
        print("1 execution")
        return 0
    if atheris is None:
        count = _mutate(target, args.seconds, args.seed, args.artifacts)
        print(f"{count:,} executions by random mutations (Atheris is not there)")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        seeds = Path(directory)
        for number, seed in enumerate(target.seeds()):
            (seeds / f"seed-{number}").write_bytes(seed)
        corpora = [*([str(args.corpus)] if args.corpus else []), str(seeds)]
        options = [f"-max_total_time={args.seconds}", f"-seed={args.seed}", f"-timeout={TIME_LIMIT_S}"]
        options += [
            "-rss_limit_mb=3000",
            f"-max_len={target.input_bytes_max}",
            "-print_final_stats=1",
            f"-artifact_prefix={args.artifacts}/",
        ]
        atheris.Setup([sys.argv[0], *options, *corpora], target.run)
        atheris.Fuzz()
    return 0


def _mutate(target: Any, seconds: float, seed: int, artifacts: str) -> int:
    rng = random.Random(seed)
    seeds = target.seeds()
    count, deadline = 0, time.monotonic() + seconds
    while (is_seed := count < len(seeds)) or time.monotonic() < deadline:
        # First each seed as it is: the properties of good inputs are rarely reached by a changed one.
        data = bytearray(seeds[count] if is_seed else rng.choice(seeds))
        for _ in range(0 if is_seed else rng.randrange(1, 6)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    data[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
                case 2:
                    del data[at : at + rng.randrange(1, 40)]
                case 3:
                    data[at:at] = rng.choice([b"\0" * 4, b"\xff" * 8, bytes(data[at : at + 30]), b"9" * 12])
        try:
            target.run(bytes(data[: target.input_bytes_max]))
        except BaseException:
            with tempfile.NamedTemporaryFile(prefix="finding-", dir=artifacts, delete=False) as file:
                file.write(data)
            print(f"finding after {count} executions with seed {seed}: {file.name}", file=sys.stderr)
            raise
        count += 1
    return count


if __name__ == "__main__":
    sys.exit(main())
