"""``kvstore size``: the size of a tier for a model, and the cost of a hit relative to computing."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any, Final

from kvstore.cli.command_line import JsonFlag, Option, Typer, size_option
from kvstore.cli.model_size import Pages, layers_of, pages_of, read_model_config
from kvstore.cli.replaying.replay import ReplayCase, ReplaySettings, auto_capacities, replay
from kvstore.cli.replaying.traces import BLOCK_TOKENS, read_trace
from kvstore.cli.reporting.terminal import Column, print_json_text, print_line, print_table, rounded_size
from kvstore.errors import ConfigError

__all__ = ["add_commands"]

_SCHEMA: Final = 1
_LAYER_COLUMNS: Final = (
    Column("kind", "layers", left=True, style="bold"),
    Column("count", "number"),
    Column("token", "bytes a token"),
    Column("state", "state"),
)
_TIER_COLUMNS: Final = (
    Column("tier", "tier", left=True, style="bold"),
    Column("rate", "rate"),
    Column("load", "load of the prompt"),
    Column("of_prefill", "of computing it"),
)

_Model = Annotated[Path, Option("--model", metavar="FILE", help="The model's config.json, or its directory.")]
_KvDtype = Annotated[str, Option("--kv-dtype", metavar="TYPE", help="As vLLM's --kv-cache-dtype: auto, fp8, …")]
_Ranks = Annotated[int, Option("--tp", metavar="N", help="Tensor parallel size.", min=1)]
_BlockTokens = Annotated[int, Option("--block-tokens", metavar="N", help="vLLM's --block-size.", min=1)]
_Capacity = Annotated[str | None, Option("--capacity", metavar="SIZE", help="Capacity of a tier: tokens that fit.")]
_Prompt = Annotated[int, Option("--prompt", metavar="TOKENS", help="Length of a prompt, for the times.", min=1)]
_Rates = Annotated[
    str | None,
    Option("--rates", metavar="NAME=SIZE,…", help="Load rate of tiers per second, such as disk=3GiB,redis=1GiB."),
]
_Prefill = Annotated[float, Option("--prefill", metavar="TOKENS/S", help="What the engine computes a second.")]
_TraceFile = Annotated[
    Path | None, Option("--trace", metavar="FILE", help="A trace of requests: the capacity for --hit-rate.")
]
_HitRate = Annotated[float, Option("--hit-rate", metavar="SHARE", help="Target hit rate, 0 to 1.")]


def add_commands(app: Typer) -> None:
    """Add the command."""
    app.command("size")(size_command)


def size_command(
    model: _Model,
    kv_dtype: _KvDtype = "auto",
    tp: _Ranks = 1,
    block_tokens: _BlockTokens = 16,
    capacity: _Capacity = None,
    prompt: _Prompt = 8000,
    rates: _Rates = None,
    prefill: _Prefill = 10_000.0,
    trace: _TraceFile = None,
    hit_rate: _HitRate = 0.5,
    json: JsonFlag = False,
) -> None:
    """Calculate the size of a tier. Bytes per token of a model, capacity, and the time of a hit.

    Computes only: no engine, model or medium is touched.
    """
    if not 0 < hit_rate <= 1 or not 0 < prefill < float("inf"):
        raise ConfigError(f"--hit-rate {hit_rate} and --prefill {prefill}: expected 0 to 1, and more than 0.")
    layers = layers_of(read_model_config(model), kv_dtype=kv_dtype, ranks=tp)
    pages = pages_of(layers, block_tokens)
    found: dict[str, Any] = {
        "token_bytes": pages.token_bytes,
        "block_tokens": pages.block_tokens,
        "block_bytes": pages.block_bytes,
        "groups": pages.groups,
        "prompt_bytes": round(pages.token_bytes * prompt),
    }
    if capacity is not None:
        size_bytes = int(size_option(capacity, "--capacity"))
        found["capacity_bytes"] = size_bytes
        found["capacity_blocks"] = size_bytes // pages.block_bytes
        found["capacity_tokens"] = size_bytes // pages.block_bytes // pages.groups * pages.block_tokens
    tiers = [_tier(name, rate, pages, prompt, prefill) for name, rate in _parsed(rates)]
    if trace is not None:
        found |= _for_hit_rate(trace, hit_rate, pages)
    rows: list[dict[str, Any]] = [
        {"kind": e.kind, "count": e.count, "token": e.token_bytes, "state": e.state_bytes} for e in layers
    ]
    if json:
        report = {"schema": _SCHEMA, "command": "size", **found, "layers": rows, "tiers": tiers}
        print_json_text(json_module.dumps(report, indent=1))
        return
    for row in rows:
        row |= {name: rounded_size(row[name]) if row[name] else None for name in ("token", "state")}
    print_table(rows, _LAYER_COLUMNS)
    _print(found, prompt, hit_rate)
    if tiers:
        print_table([_shown(tier) for tier in tiers], _TIER_COLUMNS)


def _print(found: dict[str, Any], prompt: int, hit_rate: float) -> None:
    groups = "" if found["groups"] == 1 else f", {found['groups']} of them for the same tokens"
    print_line(
        f"{rounded_size(round(found['token_bytes']))} a token; a block of {found['block_tokens']} tokens has "
        f"{rounded_size(found['block_bytes'])}{groups}; a prompt of {prompt:,} tokens has "
        f"{rounded_size(found['prompt_bytes'])}"
    )
    if "capacity_tokens" in found:
        print_line(
            f"{rounded_size(found['capacity_bytes'])} hold {found['capacity_tokens']:,} tokens "
            f"({found['capacity_blocks']:,} blocks)"
        )
    if "hit_capacity_bytes" in found:
        size_bytes, reached = found["hit_capacity_bytes"], found["hit_rate"]
        if reached >= hit_rate:
            print_line(f"{rounded_size(size_bytes)} for {reached:.0%} of the trace's blocks (wanted: {hit_rate:.0%})")
        else:
            print_line(f"no capacity gives {hit_rate:.0%}: only {reached:.0%} of the trace's blocks come again")


def _parsed(rates: str | None) -> list[tuple[str, int]]:
    found = []
    for part in rates.split(",") if rates else ():
        name, equals, size = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--rates has {part!r}. Expected such as disk=3GiB, with commas between.")
        found.append((name.strip(), int(size_option(size.strip(), f"--rates {name.strip()}"))))
        if found[-1][1] < 1:
            raise ConfigError(f"--rates {part!r}: expected more than 0 bytes a second.")
    return found


def _tier(name: str, rate: int, pages: Pages, prompt: int, prefill: float) -> dict[str, Any]:
    load_s = pages.token_bytes * prompt / rate
    return {"tier": name, "bytes_per_s": rate, "load_s": load_s, "prefill_s": prompt / prefill}


def _shown(tier: dict[str, Any]) -> dict[str, Any]:
    return {
        "tier": tier["tier"],
        "rate": f"{rounded_size(tier['bytes_per_s'])}/s",
        "load": f"{tier['load_s']:.3g} s",
        "of_prefill": f"{tier['load_s'] / tier['prefill_s']:.1%}",
    }


def _for_hit_rate(path: Path, hit_rate: float, pages: Pages) -> dict[str, Any]:
    """Return the smallest capacity of ``replay --capacity auto`` that reaches a hit rate, or the largest."""
    trace = read_trace(path, block_tokens=BLOCK_TOKENS)
    settings = ReplaySettings(bytes_per_token=max(1, round(pages.token_bytes)))
    row: dict[str, Any] = {}
    for capacity_bytes in auto_capacities(trace, settings):
        row = replay(trace, ReplayCase(capacity_bytes=capacity_bytes), settings)
        if row["hit_rate"] >= hit_rate:
            break
    return {"hit_capacity_bytes": row["capacity_bytes"], "hit_rate": row["hit_rate"]}
