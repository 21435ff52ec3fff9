"""``kvstore-bench run`` and ``sweep``: measure tiers and baselines on the same drive, side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from kvstore.cli.bench.driver import PhaseResult
from kvstore.cli.bench.measure import BASELINES, Measurement
from kvstore.cli.bench.tables import environment_line, print_costs, print_measurement
from kvstore.cli.bench.target import Target
from kvstore.cli.bench.workload import Mix, Verify, Workload, listed, parse_sizes
from kvstore.cli.command_line import (
    DefaultsFile,
    Exit,
    ExitCode,
    JsonFlag,
    Option,
    OutFile,
    Reuse,
    Tiers,
    check_output,
    duration_option,
    size_option,
    write_output,
)
from kvstore.cli.interruption import Stopping
from kvstore.cli.report import Report, environment
from kvstore.cli.terminal import Progress, latency_text, print_json_text, print_line, rounded_size, say
from kvstore.cli.tier_argument import TierArgument, parse_tier
from kvstore.config import did_you_mean
from kvstore.errors import BackendError, ConfigError
from kvstore.secret import shown

_OPS_DURATION_S: Final = 3600.0
"""Limit of a phase that ends after a number of jobs (``--ops``)."""

_SHARE_MAX: Final = 0.4
"""Largest share of a tier's capacity for the working set, so that storing as much again does not evict it."""

BlockSize = Annotated[
    str, Option("--block-size", "-b", metavar="SIZES", help="Block sizes, bytes, separated by commas.")
]
BlocksPerJob = Annotated[int, Option("--blocks-per-job", metavar="N", help="Blocks per job.")]
Jobs = Annotated[
    str, Option("--jobs", "-j", metavar="NUMBERS", help="Numbers of concurrent jobs, separated by commas.")
]
Mixes = Annotated[
    list[str] | None,
    Option("--mix", metavar="MIX", help="'store', 'load' or such as 'store=30,load=70'. Repeat to run several."),
]
HitRate = Annotated[
    float, Option("--hit-rate", metavar="SHARE", help="Share of looked-up blocks that were stored before, 0 to 1.")
]
Rate = Annotated[
    float | None,
    Option(
        "--rate",
        metavar="JOBS/S",
        help="Open loop: jobs per second. Latency counts from the scheduled start.",
    ),
]
Duration = Annotated[str | None, Option("--duration", "-d", metavar="TIME", help="Time of each phase, such as 3s.")]
Ops = Annotated[int, Option("--ops", metavar="N", help="End each phase after this number of jobs. 0: by time only.")]
Warmup = Annotated[str | None, Option("--warmup", metavar="TIME", help="Warm-up time of each phase, not counted.")]
WorkingSet = Annotated[
    str | None,
    Option("--working-set", metavar="SIZE", help="Bytes stored before the measurement, as the source of loads."),
]
Cold = Annotated[
    bool,
    Option("--cold", help="Keep loads out of the page cache, by direct I/O or by dropping it; the report says which."),
]
VerifyWhat = Annotated[
    str, Option("--verify", metavar="sample|all|none", help="Loaded blocks to compare during the measurement.")
]
Spin = Annotated[bool, Option("--spin", help="Compute in Python between polls, like an engine's scheduler.")]
Io = Annotated[str | None, Option("--io", metavar="thread|process", help="Host of the tier's I/O.")]
Baselines = Annotated[
    str | None,
    Option("--baseline", metavar="NAMES", help="Systems to compare, on the same drive: fio, vllm-fs, raw; none."),
]
PayloadKind = Annotated[str, Option("--payload", metavar="random|bf16|file:PATH", help="Kind of payload.")]
Seed = Annotated[int, Option("--seed", metavar="N", help="Seed of keys, bytes and order.")]
Runs = Annotated[
    int, Option("--runs", metavar="N", help="Number of runs, in which systems alternate; a row is the median.")
]
Quick = Annotated[bool, Option("--quick", help="Short phases and little data, as a trial.")]
CsvFile = Annotated[Path | None, Option("--csv", metavar="FILE", help="Also write the rows to a CSV file.")]
Keep = Annotated[bool, Option("--keep", help="Keep the stored blocks, for 'verify --reuse'.")]


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults of ``run`` and ``sweep``."""

    duration_s: float
    warmup_s: float = 0.5
    working_set_bytes: int = 256 << 20


_RUN: Final = Defaults(duration_s=3.0)
_SWEEP: Final = Defaults(duration_s=2.0)
_QUICK: Final = Defaults(duration_s=0.5, warmup_s=0.1, working_set_bytes=32 << 20)


def run(
    tier: Tiers = None, block_size: BlockSize = "128KiB,2MiB", blocks_per_job: BlocksPerJob = 16, jobs: Jobs = "4",
    mix: Mixes = None, hit_rate: HitRate = 1.0, rate: Rate = None, duration: Duration = None, ops: Ops = 0,
    warmup: Warmup = None, working_set: WorkingSet = None, cold: Cold = False, verify: VerifyWhat = "sample",
    spin: Spin = False, io: Io = None, baseline: Baselines = None, payload: PayloadKind = "bf16", seed: Seed = 1,
    runs: Runs = 1, quick: Quick = False, reuse: Reuse = False, keep: Keep = False, json: JsonFlag = False,
    out: OutFile = None, csv: CsvFile = None, config: DefaultsFile = None,
) -> None:  # fmt: skip
    """Measure a tier under a mix of stores and loads."""
    given = dict(locals())
    _measure("run", _RUN, mix or ["store=30,load=70"], given)


def sweep(
    tier: Tiers = None, block_size: BlockSize = "128KiB,512KiB,2MiB", blocks_per_job: BlocksPerJob = 16,
    jobs: Jobs = "1,8", mix: Mixes = None, hit_rate: HitRate = 1.0, rate: Rate = None, duration: Duration = None,
    ops: Ops = 0, warmup: Warmup = None, working_set: WorkingSet = None, cold: Cold = False,
    verify: VerifyWhat = "sample", spin: Spin = False, io: Io = None, baseline: Baselines = None,
    payload: PayloadKind = "bf16", seed: Seed = 1, runs: Runs = 1, quick: Quick = False, reuse: Reuse = False,
    keep: Keep = False, json: JsonFlag = False, out: OutFile = None, csv: CsvFile = None, config: DefaultsFile = None,
) -> None:  # fmt: skip
    """Measure stores and loads apart. All block sizes and numbers of jobs are combined."""
    given = dict(locals())
    _measure("sweep", _SWEEP, mix or ["store", "load"], given)


def _measure(command: str, defaults: Defaults, mixes: Sequence[str], given: dict[str, Any]) -> None:
    """Measure, report the results, and exit."""
    check_output(given["out"], "--out")
    check_output(given["csv"], "--csv")
    workloads = _workloads(_QUICK if given["quick"] else defaults, mixes, given)
    tiers = [tier_of(text, given["io"]) for text in given["tier"] or [""]]
    baselines = _baselines(given["baseline"], tiers[0])
    if given["runs"] < 1:
        raise ConfigError(f"--runs is {given['runs']}. Expected 1 or more.")
    failure: BackendError | None = None
    with contextlib.ExitStack() as stack:
        stopping = stack.enter_context(Stopping())
        targets = [stack.enter_context(Target(one, reuse=given["reuse"], keep=given["keep"])) for one in tiers]
        workloads, notes = _fitting(workloads, targets)
        report = Report(command, notes=notes, parameters=_parameters(given, targets, workloads, baselines))
        report.environment["targets"] = [target.described() for target in targets]
        with Progress() as progress:
            report_phase = _phase_reporter(progress) if progress.shown else None
            measurement = Measurement(
                targets, workloads, baselines, given["runs"], given["payload"], stopping, report_phase, report
            )
            try:
                measurement.run()
            except BackendError as error:
                # Earlier results are still useful.
                failure, report.complete = error, False
                report.notes.append(str(error))
            except KeyboardInterrupt:
                report.complete = False
        interrupted = stopping() or (not report.complete and failure is None)
        _print_report(report, measurement, json=given["json"], out=given["out"])
        write_output(given["csv"], report.as_csv(), "--csv")
    if measurement.wrong:
        raise Exit(ExitCode.WRONG_BYTES)
    if interrupted:
        raise Exit(ExitCode.INTERRUPTED)
    if failure is not None or measurement.failed:
        raise Exit(ExitCode.FAILED)


def _print_report(report: Report, measurement: Measurement, *, json: bool, out: Path | None) -> None:
    """Write the report to its outputs; wrong blocks also go to stderr."""
    costs = {"costs": measurement.costs} if measurement.costs else {}
    text = report.as_json(wrong=measurement.wrong, **costs)
    try:
        if json:
            print_json_text(text)
        else:
            environment_found = environment(**report.environment)
            print_line(environment_line(environment_found, report.environment["targets"][0]))
            print_measurement(report.rows)
            print_costs(measurement.costs)
            for note in report.notes:
                print_line(f"Note: {note}")
    finally:
        # Even if stdout is closed.
        write_output(out, text + "\n", "--out")
    for block in measurement.wrong:
        say(f"WRONG: {block['system']}, block {block['key']} (number {block['number']}): {block['why']}.")
    failed = {name for row in report.rows for name in row.get("errors", {})}
    if failed:
        texts = sorted({row["last_error"] for row in report.rows if row.get("last_error")})
        say(f"Errors: {', '.join(sorted(failed))}. {' '.join(texts)}".rstrip())
    if not report.complete:
        say("Aborted before the end; the figures are incomplete.")


def _workloads(defaults: Defaults, mixes: Sequence[str], given: dict[str, Any]) -> list[Workload]:
    sizes = parse_sizes(given["block_size"])
    duration = given["duration"]
    if given["verify"] not in ("sample", "all", "none"):
        raise ConfigError(f"--verify is {shown(given['verify'])}. Expected sample, all or none.")
    verify: Verify = given["verify"]
    seconds = _OPS_DURATION_S if given["ops"] else defaults.duration_s
    if duration:
        seconds = float(duration_option(duration, "--duration"))
    warmup = given["warmup"]
    working_set = given["working_set"]
    set_bytes = int(size_option(working_set, "--working-set")) if working_set else defaults.working_set_bytes
    return [
        Workload(
            block_bytes=size, blocks_per_job=given["blocks_per_job"], jobs=jobs, mix=mix, hit_rate=given["hit_rate"],
            rate=given["rate"], duration_s=seconds, ops_max=given["ops"],
            warmup_s=defaults.warmup_s if warmup is None else float(duration_option(warmup, "--warmup")),
            working_set_bytes=set_bytes, verify=verify, spin=given["spin"], cold=given["cold"], seed=given["seed"],
        )
        for size, jobs, mix in itertools.product(
            sizes, listed(given["jobs"], int, "--jobs"), [Mix.parse(text) for text in mixes]
        )
    ]  # fmt: skip


def _fitting(workloads: Sequence[Workload], targets: Sequence[Target]) -> tuple[list[Workload], list[str]]:
    """Return workloads whose working sets are not evicted while more is stored, and notes for the report."""
    known = [target.capacity_bytes for target in targets if target.capacity_bytes is not None]
    room = int(min(known) * _SHARE_MAX) if known else None
    if room is None or all(workload.stored_bytes <= room for workload in workloads):
        return list(workloads), []
    fitting = []
    for workload in workloads:
        job_bytes = workload.block_bytes * workload.blocks_per_job
        size = min(workload.working_set_bytes, room // job_bytes * job_bytes)
        fitting.append(dataclasses.replace(workload, working_set_bytes=size))
    notes = [f"The working set is limited to {rounded_size(room)}, so that stores do not evict the blocks to load."]
    if any(workload.stored_bytes > room for workload in fitting):
        notes = ["The tier's capacity is too small for these jobs: blocks are evicted before they can be loaded."]
    return fitting, notes


def tier_of(text: str, io: str | None) -> TierArgument | None:
    """Return the given tier, with the I/O host of ``--io``; None without a tier."""
    if io not in (None, "thread", "process"):
        raise ConfigError(f"--io is {shown(io)}. Expected thread or process.")
    if not text:
        return None
    tier = parse_tier(text)
    return tier.with_options(io=io) if io else tier


def _baselines(text: str | None, tier: TierArgument | None) -> list[str]:
    """Return the requested baselines; by default the raw drive of a tier on a local drive."""
    on_drive = tier is None or bool(tier.paths)
    if text is None:
        return ["raw"] if on_drive else []
    names = [] if text == "none" else listed(text, str, "--baseline")
    for name in names:
        if name not in BASELINES:
            hint = did_you_mean(name, BASELINES)
            raise ConfigError(f"--baseline has {shown(name)}. Known: {', '.join(BASELINES)}.{hint}")
    if names and not on_drive:
        raise ConfigError(f"--baseline {text}: the tier is not on a local drive. Leave it out.")
    return list(dict.fromkeys(names))


def _parameters(
    given: dict[str, Any], targets: Sequence[Target], workloads: Sequence[Workload], baselines: Sequence[str]
) -> dict[str, Any]:
    """Return the parameters for a report, without secrets."""
    first = workloads[0]
    plain = ("blocks_per_job", "jobs", "hit_rate", "rate", "ops", "cold", "verify", "spin", "seed", "runs", "quick")
    return {
        "tiers": [target.given.shown() for target in targets],
        "baselines": list(baselines),
        "block_bytes": sorted({workload.block_bytes for workload in workloads}),
        "mix": list(dict.fromkeys(str(workload.mix) for workload in workloads)),
        "duration_s": first.duration_s,
        "warmup_s": first.warmup_s,
        "working_set_bytes": first.working_set_bytes,
        "payload": given["payload"],
        **{name: given[name] for name in plain},
    }


def _phase_reporter(progress: Progress) -> Any:
    def report_phase(what: str, result: PhaseResult | None) -> None:
        if result is None:
            progress.show(what)
            return
        # Most important first, because the line is cut at the terminal's width.
        parts = [what]
        if result.lookup.blocks:
            parts.append(f"hits {100 * result.hits / result.lookup.blocks:.0f}%")
        for op, counts in (("load", result.load), ("store", result.store)):
            if counts.latencies.count:
                rate = counts.blocks * result.block_bytes / result.seconds / 1e9
                parts.append(f"{op} {rate:.2f} GB/s, p99 {latency_text(counts.latencies.percentile(99))}")
        progress.show("  ".join(parts))

    return report_phase
