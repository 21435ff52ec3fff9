"""The plan of a walk, drawn from its seed: legs, each with its own engine, and the prompts that they share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.tiering.policy import OWN_PARAMETERS

_LEGS = (
    *(("dense", "kvstore"), ("dense", "kvstore"), ("dense", "vllm"), ("dense", "vllm")),
    *(("window", "kvstore"), ("window", "vllm"), ("mamba", "kvstore"), ("mamba", "vllm")),
    *(("lora", "kvstore"), ("lora", "vllm")),
)
"""Model and manager of each; only legs of the dense model can have rows of several blocks, and one in two does."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "policy": ("adaptive", "lru", "arc"),
    "depth": (1, 2, 3),
    "speculates": (True, False),
    "scheduling": ("fcfs", "priority"),
    "sync_load_budget": (0, 1 << 20, 1 << 30),
}
TOKENS_MAX = 20
"""Tokens of the longest answer."""
WEIGHTS = 3
"""Versions of the weights."""
PROMPT_TOKENS_MAX = 600
ADAPTERS = 2
"""Adapters of the model ``"lora"``. In a batch with adapters, vLLM's CPU kernels apply the last slot to the base model,
so one more stays empty."""
BLOCK_BYTES = {"dense": 32768, "window": 16384, "mamba": 65536, "lora": 32768}
"""Approximate size of a block of the primary tier."""
PRIMARY_BLOCKS = {"dense": (24, 40), "window": (48, 80), "mamba": (12, 20), "lora": (24, 40)}
"""Blocks of the primary tier."""
FLOOR_BLOCKS = {"dense": 60, "window": 80, "mamba": 140, "lora": 60}
"""Blocks of the device: too few for eight requests at once. The hybrid has enough for them, because otherwise 0.33
takes more blocks in a step than there are and ends with its own ValueError, under vLLM's manager, too."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that has one right answer under each version of the weights."""

    tokens: list[int]
    salt: str  # The tenant's salt; empty for none.
    adapter: int  # Number of an adapter, for the model ``"lora"`` only; 0 for the base model.


@dataclass(frozen=True)
class Leg:
    """One engine and its workload."""

    seed: int  # Seed of the leg.
    model: str  # ``"dense"``, ``"window"``, ``"mamba"``, or ``"lora"``: dense, with adapters.
    manager: str  # ``"kvstore"`` or ``"vllm"``.
    requests: int  # Number of requests.
    offloading: dict[str, Any]  # ``kv_connector_extra_config``, without ``path`` of the file tiers.
    llm: dict[str, Any]  # Arguments of ``LLM``.
    weights: int
    """Number of versions of the weights; the first is that of the model's files. With a single version blocks outlive
    resets in the tiers, and are loaded into slots that earlier copies may still touch (with vLLM's manager from 0.33
    on)."""
    resets_weights_first: bool  # Whether a weight update resets the caches before it changes the weights, or after.

    def extra(self, directory: Path) -> dict[str, Any]:
        """Return ``kv_connector_extra_config`` with the tiers' files in a directory."""
        tiers = [
            {**tier, "path": str(directory / tier["label"])} if tier["type"].endswith("File") else tier
            for tier in self.offloading["secondary_tiers"]
        ]
        return {**self.offloading, "secondary_tiers": tiers}


def plan_legs(seed: int, requests: int, version: tuple[int, int]) -> list[Leg]:
    """Return the legs of a walk, model after model.

    Every walk has each model under each manager, each eviction policy, one to three tiers, rows of one block and of
    several, with and without n-gram speculation, both scheduling policies, each budget of synchronous loads, and
    kvstore's manager with and without its gate. Under each manager, the weights change in one leg and stay in another.
    The seed decides the combinations.
    """
    rng = random.Random(seed)
    weights = {manager: _deck(rng, (1, WEIGHTS), len(_LEGS)) for manager in ("kvstore", "vllm")}
    # kvstore's manager is the default, and gets at least two thirds.
    parts = [2 if manager == "kvstore" else 1 for _, manager in _LEGS]
    shares = [requests * part // sum(parts) for part in parts]
    shares[0] += requests - sum(shares)
    decks = {name: _deck(rng, values, len(_LEGS)) for name, values in _CHOICES.items()}
    rows = {manager: _deck(rng, (1, rng.choice((2, 4))), 2) for manager in ("kvstore", "vllm")}
    # From a separate generator, so that a seed draws everything else as before.
    gates = _deck(random.Random(seed), (True, False), len(_LEGS))
    legs = []
    for (model, manager), share in zip(_LEGS, shares, strict=True):
        drawn = {name: deck.pop() for name, deck in decks.items()}
        drawn |= {"rows": rows[manager].pop() if model == "dense" else 1, "weights": weights[manager].pop()}
        if manager == "kvstore":
            drawn["gate"] = gates.pop()
        legs.append(_leg(rng, model, manager, share, drawn, version))
    return legs


def plan_prompts(seed: int) -> list[Prompt]:
    """Return the prompts of a walk: families with long common prefixes of many lengths, salts and adapters."""
    rng = random.Random(seed)
    families = [[rng.randrange(2, 512) for _ in range(PROMPT_TOKENS_MAX)] for _ in range(6)]
    prompts = []
    for _ in range(36):
        common = rng.choice(families)[: rng.randrange(33, PROMPT_TOKENS_MAX - 60)]
        tokens = common + [rng.randrange(2, 512) for _ in range(rng.choice((0, 1, rng.randrange(60))))]
        prompts.append(Prompt(tokens, rng.choice(("", "", "", "", "one", "two")), rng.randrange(ADAPTERS + 1)))
    return prompts


def plan_policy(rng: random.Random) -> dict[str, Any] | None:
    """Return the offload policy of a request, None for most."""
    if rng.random() < 0.7:
        return None
    return rng.choice(
        [
            {"store": False},
            {"load": False},
            {"store": 0.5},
            {"lazy": True},
            {"cpu": False},
            {"ttl": 0.05},
            {"tiers": ["t0"]},
            {"load": ["t0"]},
        ]
    )


def _deck(rng: random.Random, values: tuple[Any, ...], count: int) -> list[Any]:
    """Return ``count`` values in random order, each equally often; the last ones include every value."""
    deck: list[Any] = []
    while len(deck) < count:
        deck = [*rng.sample(values, len(values)), *deck]
    return deck


def _leg(
    rng: random.Random,
    model: str,
    manager: str,
    requests: int,
    drawn: dict[str, Any],
    version: tuple[int, int],
) -> Leg:
    # The primary tier holds the blocks of a few prompts, the first tier some more, so both evict.
    blocks = rng.choice(PRIMARY_BLOCKS[model])
    policy, weights = drawn["policy"], drawn["weights"]
    # Before 0.33 vLLM's manager promotes into slots that copies from before a reset may still touch.
    reset = "keep" if weights == 1 and (manager == "kvstore" or version >= (0, 33)) else "forget"
    here = "tests.vllm.walk.slow_media"
    tiers: list[dict[str, Any]] = [
        {"type": f"{here}:SlowFile", "label": "t0", "capacity": rng.choice((4, 64)) * 2**20, "reserve": 0},
        {"type": f"{here}:SlowMemory", "label": "t1", "capacity": 8 * 2**20},
        {"type": f"{here}:SlowFile", "label": "t2", "capacity": 64 * 2**20, "reserve": 0},
    ]
    offloading: dict[str, Any] = {
        "spec_name": "SlowSpec",
        "spec_module_path": "tests.vllm.walk.slow_copies",
        "manager": manager,
        "cpu_bytes_to_use": blocks * BLOCK_BYTES[model],
        # vLLM's manager has two policies.
        "eviction_policy": policy if manager == "kvstore" or policy in ("lru", "arc") else "lru",
        "secondary_tiers": [{**tier, "reset": reset} for tier in tiers[: drawn["depth"]]],
    }
    if manager == "kvstore":
        offloading["tiering"] = {"gate": drawn["gate"], "allow": [*OWN_PARAMETERS, "lazy", "ttl"]}
    if drawn["rows"] > 1:
        offloading["blocks_per_chunk"] = drawn["rows"]
    if rng.random() < 0.5:
        offloading["canonical_layout"] = False
    if version >= (0, 33):
        offloading["sync_load_budget_bytes"] = drawn["sync_load_budget"]
    llm: dict[str, Any] = {
        "num_gpu_blocks_override": FLOOR_BLOCKS[model],
        "max_num_batched_tokens": rng.choice((128, 256)),
        "scheduling_policy": drawn["scheduling"],
    }
    if model == "lora":
        llm |= {"enable_lora": True, "max_loras": ADAPTERS + 1, "max_lora_rank": 8}
    if model != "mamba" and drawn["speculates"]:
        llm["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    return Leg(rng.randrange(1 << 30), model, manager, requests, offloading, llm, weights, rng.random() < 0.5)
