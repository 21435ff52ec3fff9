"""``kvstore-bench replay``: replays a trace through tiers, to compare policies and capacities."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from kvstore.cli.bench.engine import Link
from kvstore.cli.bench.plot import check_pictures, pictures_of
from kvstore.cli.bench.room import AGES
from kvstore.cli.bench.simulation import (
    OPTIMUM,
    ReplayCase,
    ReplaySettings,
    auto_capacities,
    check_case,
    own_policy,
    replay,
)
from kvstore.cli.bench.target import Target
from kvstore.cli.bench.traces import BLOCK_TOKENS, Trace, TraceShape, generate_trace, read_trace, write_trace
from kvstore.cli.command_line import (
    Argument,
    Exit,
    ExitCode,
    JsonFlag,
    Option,
    OutFile,
    Reuse,
    check_output,
    duration_option,
    json_object,
    size_option,
    write_output,
)
from kvstore.cli.report import Report
from kvstore.cli.terminal import Column, Progress, print_json_text, print_table, rounded_size, say
from kvstore.cli.tier_argument import TierArgument, parse_tier
from kvstore.config import did_you_mean
from kvstore.errors import ConfigError
from kvstore.eviction import make_policy
from kvstore.tenants import Tenants

_PICTURES: Final[dict[str, Literal["png", "svg"]]] = {".png": "png", ".svg": "svg"}

_COLUMNS: Final = (
    Column("policy", "policy", left=True, style="bold"),
    Column("capacity", "capacity"),
    Column("hits", "hits"),
    Column("token_hits", "of tokens"),
    Column("tenants", "by tenant", left=True, rank=1),
    Column("from", "from", left=True, rank=2),
    Column("evicted_blocks", "evicted", rank=3),
    Column("stored", "stored", rank=4),
    Column("loaded", "loaded", rank=4),
    Column("saved", "prefill saved", rank=1),
    Column("wait_s_p99", "wait p99 s", rank=5),
    Column("ttft_s_p50", "TTFT p50 s"),
    Column("ttft_s_p95", "p95 s"),
    Column("recomputed", "not loaded", rank=2),
    Column("seconds", "took s", rank=6),
)

_REQUESTS_MAX: Final = 1_000_000
"""Most requests of a trace, which is held in memory at some kilobytes per request."""

_TraceFile = Annotated[
    str | None,
    Argument(metavar="TRACE", help="A trace in Mooncake's format, - for stdin. Without one, a trace is generated."),
]
_Requests = Annotated[
    int | None, Option(metavar="N", help="Number of requests to replay or generate.", min=1, max=_REQUESTS_MAX)
]
_Seed = Annotated[int, Option(metavar="N", help="Seed of a generated trace.")]
_BlockTokens = Annotated[int, Option(metavar="N", help="Tokens per block of the trace.", min=1)]
_SaveTrace = Annotated[Path | None, Option(metavar="FILE", help="Write the trace to a file.")]
_Tiers = Annotated[
    list[str] | None,
    Option("--tier", "-t", metavar="JSON|URL|@FILE", help="A tier below CPU memory; several, the fastest first."),
]
_Cpu = Annotated[str | None, Option(metavar="SIZE", help="CPU memory of the primary tier, such as 64GiB.")]
_Policies = Annotated[
    str | None,
    Option(
        metavar="NAMES",
        help="Eviction policies to compare: adaptive, lru, arc, belady, and ages, that of the disk tier. "
        "Without it, the tier's own; a plot has lru and belady, too, where they can be simulated.",
    ),
]
_Capacities = Annotated[
    str | None,
    Option(
        metavar="SIZES|auto",
        help="Capacities to compare, of the last tier (of CPU memory if there is none), such as 64GiB,1TiB.",
    ),
]
_Dry = Annotated[bool, Option("--dry", help="Simulate keys and sizes only: no data is written, and no time passes.")]
_Speed = Annotated[
    float | None, Option(metavar="FACTOR", help="Replay speed relative to the trace; without it, as fast as possible.")
]
_BytesPerToken = Annotated[
    str, Option(metavar="SIZE", help="KV cache bytes per token. 128KiB: Llama 3.1 8B in 16 bits.")
]
_Prefill = Annotated[float, Option(metavar="TOKENS/S", help="What the engine computes a second.")]
_StepTokens = Annotated[int, Option(metavar="N", help="Tokens that the engine computes per step.", min=1)]
_Concurrency = Annotated[
    int, Option(metavar="N", help="Concurrent requests; ignored in a dry run without --link.", min=1)
]
_Links = Annotated[
    list[str] | None,
    Option(
        metavar="RATE[,LATENCY]",
        help="How fast a tier of a dry run delivers, such as 2GB/s,1ms; once for each tier. Time passes then.",
    ),
]
_Gate = Annotated[bool, Option("--gate/--no-gate", help="Load only what is faster than computing it, or all.")]
_Offload = Annotated[
    str | None, Option(metavar="JSON", help="Offload policy of all requests, such as '{\"min_uses\": 2}'.")
]
_Tenants = Annotated[
    str | None,
    Option(metavar="JSON", help="Tenants that share the tiers; requests of the trace name theirs (docs/replay.md)."),
]
_Plot = Annotated[Path | None, Option(metavar="FILE", help="Draw the hit rate over the capacity: .png or .svg.")]


def replay_command(
    trace: _TraceFile = None,
    requests: _Requests = None,
    seed: _Seed = 0,
    block_tokens: _BlockTokens = BLOCK_TOKENS,
    save_trace: _SaveTrace = None,
    tier: _Tiers = None,
    cpu: _Cpu = None,
    policy: _Policies = None,
    capacity: _Capacities = None,
    dry: _Dry = False,
    speed: _Speed = None,
    bytes_per_token: _BytesPerToken = "128KiB",
    prefill: _Prefill = 10_000.0,
    step_tokens: _StepTokens = 8192,
    concurrency: _Concurrency = 8,
    offload: _Offload = None,
    tenants: _Tenants = None,
    link: _Links = None,
    gate: _Gate = True,
    plot: _Plot = None,
    json: JsonFlag = False,
    out: OutFile = None,
    reuse: Reuse = False,
) -> None:
    """Replay a trace of requests. Prints hit rates by tier, capacity and eviction policy.

    The trace goes through the manager that serves engines, block by block; without a tier, through CPU memory alone.
    """
    _check_plot(plot, capacity)
    for file, option in ((save_trace, "--save-trace"), (plot, "--plot"), (out, "--out")):
        check_output(file, option)
    settings = ReplaySettings(
        tiers=[parse_tier(text) for text in tier or ()],
        cpu_bytes=size_option(cpu, "--cpu") if cpu else None,
        dry=dry,
        bytes_per_token=size_option(bytes_per_token, "--bytes-per-token"),
        prefill_tokens_per_s=prefill,
        step_tokens=step_tokens,
        concurrency=concurrency,
        speed=speed,
        offload=json_object(offload, "--offload"),
        tenants=None if tenants is None else _tenants(json_object(tenants, "--tenants")),
        links=[_link(text) for text in link or ()],
        gate=gate,
    )
    policies: list[str | None] = [None]
    if policy is not None:
        policies = [_policy(name.strip()) for name in policy.split(",")]
    elif plot is not None and dry:
        # The optimum shows what a better choice of blocks could gain at most.
        policies = [*dict.fromkeys([own_policy(settings), "lru", *([] if tier or tenants else [OPTIMUM])])]
    found = _trace(trace, requests, seed, block_tokens)
    if save_trace is not None:
        write_trace(save_trace, found)
    cases = [ReplayCase(name, size) for size in _capacities(capacity, found, settings) for name in policies]
    for case in cases:
        check_case(found, case, settings)
    with contextlib.ExitStack() as stack:
        opened = settings.tiers
        if not dry:
            opened = [stack.enter_context(Target(each, reuse=reuse)).tier for each in settings.tiers]
        report = _replay_all(found, cases, settings, opened)
    _print(report, json, out)
    if plot is not None:
        _draw(report, plot)
    _exit(report)


def _replay_all(
    trace: Trace, cases: Sequence[ReplayCase], settings: ReplaySettings, opened: Sequence[TierArgument]
) -> Report:
    """Replay case after case; after an interruption the finished cases are reported."""
    report = Report("replay", parameters=_parameters(trace, settings))
    settings = replace(settings, tiers=opened)
    with Progress() as progress:
        try:
            for case in cases:
                report.rows.append(replay(trace, case, settings, _watched(progress, trace, case)))
        except KeyboardInterrupt:
            report.complete = False
    return report


def _check_plot(path: Path | None, capacity: str | None) -> None:
    if path is None:
        return
    if path.suffix not in _PICTURES:
        raise ConfigError(f"--plot is {str(path)!r}. Expected a name that ends in {' or '.join(_PICTURES)}.")
    if capacity is None:
        raise ConfigError("Without capacities there is nothing to draw. Give --capacity, such as auto.")
    check_pictures()


def _draw(report: Report, path: Path) -> None:
    for picture in pictures_of(report.rows):
        write_output(path, picture.render(_PICTURES[path.suffix]), "--plot")


def _exit(report: Report) -> None:
    if not report.complete:
        raise Exit(ExitCode.INTERRUPTED)
    wrong = sum(row["wrong_blocks"] for row in report.rows)
    if wrong:
        say(f"{wrong} blocks came back with other bytes than were stored.")
        raise Exit(ExitCode.WRONG_BYTES)


def _trace(path: str | None, requests: int | None, seed: int, block_tokens: int) -> Trace:
    if path is not None:
        return read_trace(path, block_tokens=block_tokens, limit=requests)
    shape = TraceShape(seed=seed, block_tokens=block_tokens)
    return generate_trace(shape if requests is None else TraceShape(requests, seed, block_tokens))


def _policy(name: str) -> str:
    if name.lower() in (AGES, OPTIMUM):
        return name.lower()
    try:
        return make_policy(name).name
    except ConfigError as error:
        hint = did_you_mean(name, [AGES, OPTIMUM])
        raise ConfigError(
            f"{error} A replay also has {OPTIMUM!r}, the optimum, and {AGES!r}, the disk tier's.{hint}"
        ) from None


def _link(text: str) -> Link:
    """Parse a rate with an optional latency: ``2GB/s,1ms``."""
    rate, _, latency = text.partition(",")
    found = Link(float(size_option(rate.strip().removesuffix("/s"), "--link")))
    if not found.bytes_per_s:
        raise ConfigError(f"--link is {text!r}. Expected a rate above 0.")
    return Link(found.bytes_per_s, float(duration_option(latency.strip(), "--link"))) if latency else found


def _tenants(options: dict[str, Any]) -> Tenants:
    try:
        return msgspec.convert({"by": "parameter", **options}, Tenants)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"--tenants: {error}") from None


def _capacities(text: str | None, trace: Trace, settings: ReplaySettings) -> list[int | None]:
    if text is None:
        return [None]
    if text.strip() == "auto":
        return [*auto_capacities(trace, settings)]
    return [size_option(part.strip(), "--capacity") for part in text.split(",")]


def _parameters(trace: Trace, settings: ReplaySettings) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "trace_requests": len(trace),
        "trace_blocks": trace.blocks,
        "trace_distinct_blocks": trace.distinct_blocks,
        "block_tokens": trace.block_tokens,
        "dry": settings.dry,
        "cpu_bytes": settings.cpu_bytes,
        "bytes_per_token": int(settings.bytes_per_token),
        "prefill_tokens_per_s": settings.prefill_tokens_per_s,
        "step_tokens": settings.step_tokens,
        "concurrency": settings.requests_at_once,
        "speed": settings.speed,
        "offload": dict(settings.offload),
        "tenants": msgspec.to_builtins(settings.tenants),
        "tiers": [tier.shown() for tier in settings.tiers],
        "links": [asdict(link) for link in settings.links],
        "gate": settings.gate,
    }


def _print(report: Report, json: bool, out: Path | None) -> None:
    write_output(out, report.as_json() + "\n", "--out")
    if json:
        print_json_text(report.as_json())
        return
    parameters = report.parameters
    timed = bool(parameters["links"])
    title = (
        f"{parameters['trace']}: {parameters['trace_requests']} requests, {parameters['trace_blocks']} blocks of "
        f"{parameters['block_tokens']} tokens, {parameters['trace_distinct_blocks']} distinct"
    )
    print_table([_shown(row, timed=timed) for row in report.rows], _COLUMNS, title=title)


def _shown(row: dict[str, Any], *, timed: bool) -> dict[str, Any]:
    shares = [f"{tier['name']} {tier['hit_blocks'] / max(1, row['blocks']):.1%}" for tier in row["tiers"]]
    below = row["tiers"][1:]
    return {
        **row,
        "capacity": "no limit" if row["capacity_bytes"] is None else rounded_size(row["capacity_bytes"]),
        "hits": f"{row['hit_rate']:.2%}",
        "token_hits": f"{row['hit_rate_tokens']:.2%}",
        "from": " + ".join(shares) if below else None,
        "tenants": ", ".join(
            f"{name} {found['hit_blocks'] / max(1, found['blocks']):.1%}" for name, found in row["tenants"].items()
        )
        or None,
        "stored": rounded_size(sum(tier["stored_bytes"] for tier in below)) if below else None,
        "loaded": rounded_size(sum(tier["loaded_bytes"] for tier in below)) if below else None,
        "saved": f"{row['prefill_s_saved']:,.0f} of {row['prefill_s']:,.0f} s",
        "wait_s_p99": row["wait_s_p99"] if timed or not row["dry"] else None,
        "ttft_s_p50": row["ttft_s_p50"] if timed else None,
        "ttft_s_p95": row["ttft_s_p95"] if timed else None,
        "recomputed": row.get("gate", {}).get("recomputed") if timed else None,
    }


def _watched(progress: Progress, trace: Trace, case: ReplayCase) -> Callable[[int], None] | None:
    """Return a function that shows the progress of a replay; None if progress is not visible."""
    if not progress.shown:
        return None
    policy = "" if case.policy is None else f" {case.policy}"
    size = "" if case.capacity_bytes is None else f" {rounded_size(case.capacity_bytes)}"

    def show(done: int) -> None:
        if done % 50 == 0 or done == len(trace):
            progress.show(f"replay{policy}{size}: {done} of {len(trace)}")

    return show
