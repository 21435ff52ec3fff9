"""``kvstore size``: the size of a tier for a model, and the cost of a hit relative to computing."""

from __future__ import annotations

import json as json_module
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from kvstore.cli.bench.simulation import OPTIMUM, ReplayCase, ReplaySettings, auto_capacities, replay
from kvstore.cli.bench.traces import BLOCK_TOKENS, read_trace
from kvstore.cli.command_line import JsonFlag, Option, parsed_json, size_option, text_of
from kvstore.cli.terminal import Column, latency_text, print_json_text, print_line, print_table, rounded_size
from kvstore.errors import ConfigError
from kvstore.primary.memory import shortage
from kvstore.primary.pages import described_allocation
from kvstore.primary.shared import SHM

_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
_KV_DTYPE_BYTES: Final = {**_DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

_FULL: Final = frozenset({"full_attention", "attention"})
_WINDOW: Final = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
_STATE: Final = frozenset({"linear_attention", "mamba"})

_KERNEL_TOKENS: Final = 16
"""Tokens that kernels process together; a block of a model with states is a multiple of it."""

_ALIKE: Final = 1.5
"""Limit of the ratio of the layers of the most frequent kind to those of the rarest. Below it each kind is one group,
with padding; otherwise groups have as many layers as the rarest kind."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one kind."""

    kind: str  # ``"full"``, ``"window"``, ``"mla"`` or ``"state"``.
    count: int  # Number of layers.
    token_bytes: int = 0  # KV cache of a token in one layer; 0 for states.
    state_bytes: int = 0  # State of one layer, which replaces the tokens before it; 0 for attention.


def read_model_config(model: str) -> dict[str, Any]:
    """Read a ``config.json``, or that of a model's directory, or of a model that was downloaded by its name.

    Raises:
        ConfigError: The file cannot be read, or is not a model's configuration.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    elif _is_name(model):
        path = _downloaded(model)
    found = parsed_json(text_of(f"@{path}", "--model"), f"--model {str(path)!r}", " Give a model's config.json.")
    if not isinstance(found, dict):
        raise ConfigError(f"--model {str(path)!r} is not a JSON object. Give a model's config.json.")
    text = found.get("text_config")
    return {**found, **text} if isinstance(text, dict) else found


def _is_name(model: str) -> bool:
    """Return whether a model is given as on a hub, such as ``meta-llama/Llama-3.1-8B``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", model, re.ASCII) is not None and not Path(model).exists()


def _downloaded(name: str) -> Path:
    """Return the ``config.json`` of a model in the cache of the hub's client."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    found = sorted(cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"), key=os.path.getmtime)
    if not found:
        raise ConfigError(
            f"--model {name!r} is not a file, and {cache} has no download of it. Get its configuration: 'hf download "
            f"{name} config.json', or give the path of a config.json."
        )
    return found[-1]


def layers_of(config: Mapping[str, Any], *, kv_dtype: str = "auto", ranks: int = 1) -> list[Layers]:
    """Return the layers of a model that have a KV cache or a state, over all tensor parallel ranks.

    ``kv_dtype`` is a value of ``--kv-cache-dtype``. KV heads are replicated if there are fewer heads than ranks.

    Raises:
        ConfigError: A field is missing, or the kind of model is unknown.
    """
    if kv_dtype != "auto" and kv_dtype not in _KV_DTYPE_BYTES:
        raise ConfigError(f"--kv-dtype is {kv_dtype!r}. Expected auto, {', '.join(_KV_DTYPE_BYTES)}.")
    kinds = _kinds(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    has_states = not _STATE.isdisjoint(kinds)
    if dtype not in _DTYPE_BYTES and (has_states or kv_dtype == "auto"):
        remedy = "Run an engine once to measure" if has_states else "Give --kv-dtype"
        raise ConfigError(f"The model's data type is {dtype!r}. Known: {', '.join(_DTYPE_BYTES)}. {remedy}.")
    model_bytes = _DTYPE_BYTES.get(dtype, 0)
    kv_bytes = model_bytes if kv_dtype == "auto" else _KV_DTYPE_BYTES[kv_dtype]
    if config.get("kv_lora_rank"):
        # Latents are the same on all ranks, and stored once.
        latent = (_number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")) * kv_bytes
        return [Layers("mla", len(kinds), latent)]
    found = []
    for kind, names in (("full", _FULL), ("window", _WINDOW)):
        if count := sum(name in names for name in kinds):
            found.append(Layers(kind, count, _attention_bytes(config, kv_bytes, ranks)))
    if count := sum(name in _STATE for name in kinds):
        found.append(Layers("state", count, state_bytes=_state_bytes(config, model_bytes)))
    return found


@dataclass(frozen=True, slots=True)
class Pages:
    """Blocks of a model."""

    block_tokens: int
    block_bytes: int  # Bytes of a block of one group, over all ranks: the unit of vLLM's pool.
    useful_bytes: tuple[int, ...]  # Bytes of a block that each group of layers fills, with a block for the same tokens.

    @property
    def groups(self) -> int:
        """Number of groups of layers."""
        return len(self.useful_bytes)

    @property
    def token_bytes(self) -> float:
        """Bytes per token, with the blocks of all groups."""
        return self.block_bytes * self.groups / self.block_tokens


def pages_of(layers: Sequence[Layers], block_tokens: int = 16) -> Pages:
    """Return vLLM's division of layers into blocks.

    A model with several kinds of layers has several groups with equal numbers of layers, and a block has the same
    bytes in each. The state of a layer takes one page for any number of tokens, so a block has at least as many tokens
    as fill a page of that size, and at least ``block_tokens`` (vLLM's ``--block-size``).
    """
    if not layers:
        raise ConfigError("The model has no layers with a KV cache. There is nothing to offload.")
    token_bytes = {each.token_bytes for each in layers if each.token_bytes}
    if len(token_bytes) > 1:
        raise ConfigError("The layers of this model differ in KV cache length. Run an engine once to measure.")
    per_token = max(token_bytes, default=0)
    state_bytes = max((each.state_bytes for each in layers), default=0)
    if per_token and state_bytes:
        block_tokens = max(block_tokens, -(-state_bytes // (per_token * _KERNEL_TOKENS)) * _KERNEL_TOKENS)
    page_bytes = max(per_token * block_tokens, state_bytes)
    counts = [each.count for each in layers]
    size = max(counts) if max(counts) < min(counts) * _ALIKE else min(counts)
    useful = []
    for each in layers:
        groups, page = -(-each.count // size), each.state_bytes or each.token_bytes * block_tokens
        useful += [len(range(group, each.count, groups)) * page for group in range(groups)]
    return Pages(block_tokens, page_bytes * size, tuple(useful))


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer with a KV cache or a state."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        known = {"M": "mamba", "*": "full_attention"}
        return [known[letter] for letter in pattern if letter in known]
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        unknown = {str(kind) for kind in kinds} - _FULL - _WINDOW - _STATE
        if unknown:
            raise ConfigError(f"Layers of the kind {min(unknown)!r} are unknown. Run an engine once to measure.")
        return [str(kind) for kind in kinds]
    count = _number(config, "num_hidden_layers")
    if config.get("attn_layer_period"):
        period, offset = _number(config, "attn_layer_period"), int(config.get("attn_layer_offset", 0))
        return ["full_attention" if layer % period == offset else "mamba" for layer in range(count)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * count
    pattern_length = config.get("sliding_window_pattern")
    if isinstance(pattern_length, int) and pattern_length > 1:
        return [
            "full_attention" if (layer + 1) % pattern_length == 0 else "sliding_attention" for layer in range(count)
        ]
    return ["sliding_attention"] * count


def _attention_bytes(config: Mapping[str, Any], kv_bytes: int, ranks: int) -> int:
    heads = _number(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or _number(config, "hidden_size") // heads)
    return 2 * max(kv_heads, ranks) * head_dim * kv_bytes


def _state_bytes(config: Mapping[str, Any], model_bytes: int) -> int:
    """Return the bytes of one layer's state: the end of a convolution, and the state of the recurrence."""
    kept_bytes = _DTYPE_BYTES.get(str(config.get("mamba_ssm_cache_dtype")), model_bytes)
    if config.get("linear_num_value_heads"):  # Gated delta net.
        keys = _number(config, "linear_num_key_heads") * _number(config, "linear_key_head_dim")
        values = _number(config, "linear_num_value_heads") * _number(config, "linear_value_head_dim")
        convolved = (2 * keys + values) * (_number(config, "linear_conv_kernel_dim") - 1)
        return convolved * model_bytes + values * _number(config, "linear_key_head_dim") * kept_bytes
    width = int(config.get("conv_kernel") or config.get("mamba_d_conv") or 0)
    state = int(config.get("ssm_state_size") or config.get("mamba_d_state") or 0)
    heads = int(config.get("mamba_num_heads") or config.get("mamba_n_heads") or 0)
    if not width or not state:
        raise ConfigError("The size of this model's states is unknown. Run an engine once to measure.")
    if heads:  # Mamba 2.
        inner = heads * int(config.get("mamba_head_dim") or config.get("mamba_d_head") or 0)
        groups = int(config.get("n_groups") or config.get("mamba_n_groups") or 1)
        convolved = (inner + 2 * groups * state) * (width - 1)
    else:
        inner = int(config.get("mamba_expand") or 2) * _number(config, "hidden_size")
        convolved = inner * (width - 1)
    return convolved * model_bytes + inner * state * kept_bytes


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"The model has {name} = {value!r}. Expected a number above 0. Give the model's config.json.")
    return value


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

_RATE_COLUMNS: Final = (
    Column("capacity_bytes", "capacity", style="bold"),
    Column("hit_rate", "hits"),
    Column("lru", "by LRU"),
    Column("optimum", "at most"),
)

_Model = Annotated[
    str,
    Option(
        "--model", metavar="NAME|FILE", help="The model: its name, if it was downloaded, its directory or config.json."
    ),
]
_KvDtype = Annotated[str, Option("--kv-dtype", metavar="TYPE", help="As vLLM's --kv-cache-dtype: auto, fp8, …")]
_Ranks = Annotated[int, Option("--tp", metavar="N", help="Tensor parallel size.", min=1)]
_BlockTokens = Annotated[int, Option("--block-tokens", metavar="N", help="vLLM's --block-size.", min=1)]
_Capacity = Annotated[str | None, Option("--capacity", metavar="SIZE", help="Capacity of a tier: tokens that fit.")]
_RegionSize = Annotated[
    str | None,
    Option("--region", metavar="SIZE", help="A primary tier (cpu_bytes_to_use): whether it fits into this machine."),
]
_Prompt = Annotated[int, Option("--prompt", metavar="TOKENS", help="Length of a prompt, for the times.", min=1)]
_Rates = Annotated[
    str | None,
    Option("--rates", metavar="NAME=SIZE,…", help="Load rate of tiers per second, such as disk=3GiB,redis=1GiB."),
]
_Prefill = Annotated[float, Option("--prefill", metavar="TOKENS/S", help="Prefill rate of the engine.")]
_TraceFile = Annotated[
    Path | None,
    Option("--trace", metavar="FILE", help="A trace of requests: hit rates by capacity."),
]
_HitRate = Annotated[float, Option("--hit-rate", metavar="SHARE", help="Target hit rate, 0 to 1.")]


def size_command(
    model: _Model,
    kv_dtype: _KvDtype = "auto",
    tp: _Ranks = 1,
    block_tokens: _BlockTokens = 16,
    capacity: _Capacity = None,
    region: _RegionSize = None,
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
    if not 0 < hit_rate <= 1:
        raise ConfigError(f"--hit-rate is {hit_rate}. Expected a share above 0 and at most 1, such as 0.5.")
    if not 0 < prefill < float("inf"):
        raise ConfigError(f"--prefill is {prefill}. Expected tokens per second, above 0.")
    layers = layers_of(read_model_config(model), kv_dtype=kv_dtype, ranks=tp)
    pages = pages_of(layers, block_tokens)
    found: dict[str, Any] = {
        "token_bytes": pages.token_bytes,
        "block_tokens": pages.block_tokens,
        "block_bytes": pages.block_bytes,
        "groups": pages.groups,
        "useful_bytes": list(pages.useful_bytes),
        "prompt_bytes": round(pages.token_bytes * prompt),
    }
    if capacity is not None:
        size_bytes = int(size_option(capacity, "--capacity"))
        found["capacity_bytes"] = size_bytes
        found["capacity_blocks"] = size_bytes // pages.block_bytes
        found["capacity_tokens"] = size_bytes // pages.block_bytes // pages.groups * pages.block_tokens
    if region is not None:
        region_bytes = int(size_option(region, "--region"))
        found["region"] = shortage(region_bytes, SHM) or described_allocation(region_bytes)
    tiers: list[dict[str, Any]] = [
        {"tier": name, "bytes_per_s": rate, "load_s": pages.token_bytes * prompt / rate, "prefill_s": prompt / prefill}
        for name, rate in _parsed(rates)
    ]
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
    served = model if _is_name(model) else str(Path(model).parent if Path(model).is_file() else model)
    cpu = ["--cpu", region] if region is not None else []
    url = f"file:///mnt/kv?capacity={capacity or '500GiB'}"
    for tier in tiers:
        tier["of_prefill"] = f"{tier['load_s'] / tier['prefill_s']:.1%}"
        tier |= {"rate": f"{rounded_size(tier['bytes_per_s'])}/s", "load": latency_text(tier["load_s"])}
    if tiers:
        print_table(tiers, _TIER_COLUMNS)
    print_line("to serve it with a tier on a disk, at /mnt/kv for example:")
    config = shlex.join(["kvstore", "config", "--vllm", *cpu, "-t", url])
    print_line(f'vllm serve {shlex.quote(served)} --kv-transfer-config "$({config})"')


def _print(found: dict[str, Any], prompt: int, hit_rate: float) -> None:
    groups = "" if found["groups"] == 1 else f", {found['groups']} of them for the same tokens"
    print_line(
        f"{rounded_size(round(found['token_bytes']))} a token; a block of {found['block_tokens']} tokens has "
        f"{rounded_size(found['block_bytes'])}{groups}; a prompt of {prompt:,} tokens has "
        f"{rounded_size(found['prompt_bytes'])}"
    )
    if min(found["useful_bytes"]) < found["block_bytes"]:
        filled = ", ".join(rounded_size(each) for each in found["useful_bytes"])
        print_line(f"of each block, the groups of layers fill {filled}")
    if 2 * min(found["useful_bytes"]) < found["block_bytes"]:
        print_line(
            "warning: some groups fill less than half of a block. For windows, --disable-hybrid-kv-cache-manager makes "
            "one group of all layers; for states, give a smaller --block-size"
        )
    if "capacity_tokens" in found:
        print_line(
            f"{rounded_size(found['capacity_bytes'])} hold {found['capacity_tokens']:,} tokens "
            f"({found['capacity_blocks']:,} blocks)"
        )
    if "region" in found:
        print_line(found["region"])
    if "hit_rates" in found:
        sizes = [{"capacity_bytes": rounded_size(row["capacity_bytes"])} for row in found["hit_rates"]]
        shares = [{name: f"{share:.1%}" for name, share in row.items()} for row in found["hit_rates"]]
        print_table([row | size for row, size in zip(shares, sizes, strict=True)], _RATE_COLUMNS)
        size_bytes, reached = found["hit_capacity_bytes"], found["hit_rate"]
        if reached >= hit_rate:
            print_line(f"{rounded_size(size_bytes)} for {reached:.0%} of the trace's blocks (target: {hit_rate:.0%})")
        else:
            print_line(f"no capacity reaches {hit_rate:.0%}: only {reached:.0%} of the trace's blocks are repeated")


def _parsed(rates: str | None) -> list[tuple[str, int]]:
    found = []
    for part in rates.split(",") if rates else ():
        name, equals, size = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--rates has {part!r}. Expected NAME=SIZE, separated by commas, such as disk=3GiB.")
        found.append((name.strip(), int(size_option(size.strip(), f"--rates {name.strip()}"))))
        if found[-1][1] < 1:
            raise ConfigError(f"--rates {part!r}: expected more than 0 bytes a second.")
    return found


def _for_hit_rate(path: Path, hit_rate: float, pages: Pages) -> dict[str, Any]:
    """Return the hit rates by capacity, and the smallest capacity that reaches ``hit_rate``, or the largest."""
    rates = _hit_rates(path, pages)
    reached = next((row for row in rates if row["hit_rate"] >= hit_rate), rates[-1])
    return {"hit_rates": rates, "hit_capacity_bytes": reached["capacity_bytes"], "hit_rate": reached["hit_rate"]}


def _hit_rates(path: Path, pages: Pages) -> list[dict[str, Any]]:
    """Return the hit rates of the default, LRU and the optimum at the capacities of ``replay --capacity auto``."""
    trace = read_trace(path, block_tokens=BLOCK_TOKENS)
    settings = ReplaySettings(bytes_per_token=max(1, round(pages.token_bytes)))
    policies = {"hit_rate": None, "lru": "lru", "optimum": OPTIMUM}
    return [
        {"capacity_bytes": capacity_bytes}
        | {
            name: replay(trace, ReplayCase(policy, capacity_bytes), settings)["hit_rate"]
            for name, policy in policies.items()
        }
        for capacity_bytes in auto_capacities(trace, settings)
    ]
