"""``kvstore-bench verify``: store blocks, open the tier again, load them and compare every byte."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Final

from kvstore.cli.bench.driver import Driver, PhaseResult
from kvstore.cli.bench.measure import bench_namespace, remove_blocks
from kvstore.cli.bench.payload import Payload
from kvstore.cli.bench.run import Io, Keep, PayloadKind, Seed, tier_of
from kvstore.cli.bench.systems import TierSystem
from kvstore.cli.bench.target import Target
from kvstore.cli.bench.workload import Workload, parse_sizes
from kvstore.cli.command_line import (
    Exit,
    ExitCode,
    JsonFlag,
    Option,
    OutFile,
    Reuse,
    check_output,
    size_option,
    write_output,
)
from kvstore.cli.interruption import Stopping
from kvstore.cli.report import Report
from kvstore.cli.terminal import Progress, print_json_text, print_line, rounded_size, say, size_text
from kvstore.errors import ConfigError
from kvstore.primary import Region

_AT_ONCE_BYTES: Final = 64 << 20
"""Bytes of slots, which bound the unfinished jobs (at least one)."""

Tier = Annotated[str | None, Option("--tier", "-t", metavar="JSON|URL|@FILE", help="The tier, as for 'run'.")]
OneSize = Annotated[str, Option("--block-size", "-b", metavar="SIZE", help="Block size, bytes.")]
Bytes = Annotated[str, Option("--bytes", metavar="SIZE", help="Total bytes to store, rounded to whole jobs.")]
BlocksPerJob = Annotated[int, Option("--blocks-per-job", metavar="N", help="Blocks per job.")]


def verify(
    tier: Tier = None, block_size: OneSize = "128KiB", size: Bytes = "64MiB", blocks_per_job: BlocksPerJob = 16,
    payload: PayloadKind = "bf16", seed: Seed = 1, io: Io = None, reuse: Reuse = False, keep: Keep = False,
    json: JsonFlag = False, out: OutFile = None,
) -> None:  # fmt: skip
    """Verify a tier end to end. Stores blocks, reopens the tier, loads the blocks and compares every byte.

    With --reuse, blocks that an earlier 'verify --keep' (or 'run --keep') with the same --seed, --payload and
    --block-size left are not stored again: what lies there is what is compared. A block that differs, or whose record
    does not verify, is named, and the exit status is 3. A missing block is not an error: a cache may lose it.
    Unless --keep is given, the blocks are removed in the end.
    """
    check_output(out, "--out")
    sizes = parse_sizes(block_size)
    if len(sizes) != 1:
        raise ConfigError(f"--block-size is {block_size!r}. Expected one size.")
    wanted = int(size_option(size, "--bytes"))
    job_bytes = sizes[0] * max(1, blocks_per_job)
    # A working set has at least one more job than can be unfinished, so a small one allows few concurrent jobs.
    jobs = max(1, min(8, _AT_ONCE_BYTES // job_bytes, wanted // job_bytes - 1))
    workload = Workload(
        sizes[0], blocks_per_job=blocks_per_job, jobs=jobs, seed=seed, working_set_bytes=wanted,
        verify="all",
    )  # fmt: skip
    given = tier_of(tier or "", io)
    with contextlib.ExitStack() as stack:
        stopping = stack.enter_context(Stopping())
        if given is not None and given.backend == "memory" and not given.options.get("shelf"):
            # Blocks in memory are lost when the tier closes, unless they are on a named shelf.
            given = given.with_options(shelf="kvstore-bench-verify")
        target = stack.enter_context(Target(given, reuse=reuse, keep=keep))
        room = target.capacity_bytes
        if room is not None and workload.stored_bytes > room:
            raise ConfigError(
                f"--bytes is {size}, and the tier's capacity {rounded_size(room)}: it can't keep so many blocks to be "
                "compared. Give fewer bytes, or a --tier with more."
            )
        report = Report("verify", environment={"targets": [target.described()]})
        report.parameters = {
            "tiers": [target.given.shown()], "block_bytes": sizes[0], "working_set_bytes": workload.stored_bytes,
            "blocks_per_job": blocks_per_job, "payload": payload, "seed": seed,
        }  # fmt: skip
        progress = stack.enter_context(Progress())
        stored, loaded = _store_and_load(target, workload, Payload(payload, sizes[0], seed), stopping, progress)
    row = _row(target, workload, stored, loaded)
    report.rows.append(row)
    report.complete = not stopping()
    wrong = [{"key": block.key, "number": block.number, "why": block.why} for block in loaded.wrong]
    write_output(out, report.as_json(wrong=wrong) + "\n", "--out")
    if json:
        print_json_text(report.as_json(wrong=wrong))
    else:
        print_line(_sentence(row, len(wrong)))
    for block in loaded.wrong:
        say(f"WRONG: block {block.key} (number {block.number}): {block.why}.")
    if wrong:
        raise Exit(ExitCode.WRONG_BYTES)
    if stopping():
        raise Exit(ExitCode.INTERRUPTED)
    if row["errors"] or not row["verified_blocks"]:
        say(f"Nothing can be said of blocks that could not be stored or loaded. {row['last_error'] or ''}".rstrip())
        raise Exit(ExitCode.FAILED)


def _store_and_load(
    target: Target, workload: Workload, payload: Payload, stopping: Stopping, progress: Progress
) -> tuple[PhaseResult, PhaseResult]:
    """Store missing blocks, reopen the tier, load all blocks."""
    progress.show("storing")
    stored, _ = _with_driver(target, workload, payload, stopping, Driver.fill)
    progress.show("comparing every byte")

    def load(driver: Driver, load_workload: Workload) -> PhaseResult:
        driver.adopt(load_workload.groups, load_workload.blocks_per_job)
        result = driver.verify(load_workload)
        if not target.owned and not target.keep:
            remove_blocks(driver)
        return result

    loaded, error = _with_driver(target, workload, payload, stopping, load)
    if error:
        loaded.notes.append(error)
    return stored, loaded


def _with_driver(
    target: Target, workload: Workload, payload: Payload, stopping: Stopping, phase: Any
) -> tuple[PhaseResult, str]:
    """Open the tier for one phase; return its counts and the tier's last error."""
    with contextlib.ExitStack() as stack:
        region = stack.enter_context(Region.create(workload.slots, workload.block_bytes, name="kvstore-verify"))
        rows = payload.prepare(region)
        stack.callback(rows.release)
        system = TierSystem(
            target.tier.as_config(), region.view(), workload.block_bytes, bench_namespace(payload),
            name=f"kvstore-{target.tier.name}", direct=target.direct,
        )  # fmt: skip
        stack.callback(system.close)
        result: PhaseResult = phase(Driver(system, rows, stopped=stopping), workload)
        return result, system.last_error()


def _row(target: Target, workload: Workload, stored: PhaseResult, loaded: PhaseResult) -> dict[str, Any]:
    expected = workload.groups * workload.blocks_per_job
    errors = stored.store.errors + loaded.load.errors
    errors.pop("corrupt", None)
    return {
        "bench": "verify", "system": f"kvstore-{target.tier.name}", "op": "load", "block_bytes": workload.block_bytes,
        "blocks": expected, "verified_blocks": loaded.verified_blocks, "verified": not loaded.wrong,
        "missing_blocks": expected - loaded.verified_blocks - sum(b.why.startswith("its record") for b in loaded.wrong),
        "errors": dict(errors), "last_error": next(iter(loaded.notes), None),
    }  # fmt: skip


def _sentence(row: dict[str, Any], wrong: int) -> str:
    gone = f", {row['missing_blocks']} are gone (a cache may lose blocks)" if row["missing_blocks"] else ""
    return (
        f"{row['system']}: {row['blocks']} blocks of {size_text(row['block_bytes'])}: {row['verified_blocks']} loaded "
        f"and compared byte by byte, {wrong} wrong{gone}."
    )
