"""What a walk does, drawn from its seed: legs, each with an engine of its own, and the prompts that they share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = ("dense", "window", "mamba")
TOKENS_MAX = 20
"""Tokens of the longest answer."""
WEIGHTS = 3
"""Versions of the weights."""
PROMPT_TOKENS_MAX = 600
BLOCK_BYTES = {"dense": 32768, "window": 16384, "mamba": 65536}
"""A block of the primary tier, about."""
FLOOR_BLOCKS = {"dense": 60, "window": 80, "mamba": 140}
"""Blocks of the device: too few for eight requests at once; not for the hybrid, of which 0.33 takes more blocks in a
step than there are, and dies of its own ValueError, under vLLM's manager, too."""


@dataclass(frozen=True)
class Leg:
    """One engine and what happens to it.

    Attributes:
        seed: Of all that happens to it.
        model: One of ``MODELS``.
        manager: ``"kvstore"`` or ``"vllm"``.
        requests: How many.
        offloading: ``kv_connector_extra_config``, but for ``path`` of the file tiers.
        llm: Arguments of ``LLM``.
        weights: Versions of the weights that it goes through; the first is that of the model's files. If it is the only
            one, blocks outlive resets in the tiers, and come back into slots that copies from before may still touch.
        resets_weights_first: Whether a weight update resets the caches before it changes the weights, not after.
    """

    seed: int
    model: str
    manager: str
    requests: int
    offloading: dict[str, Any]
    llm: dict[str, Any]
    weights: int
    resets_weights_first: bool

    def extra(self, directory: Path) -> dict[str, Any]:
        """Return ``kv_connector_extra_config`` with the tiers' files in a directory."""
        tiers = [
            {**tier, "path": str(directory / tier["label"])} if tier["type"].endswith("File") else tier
            for tier in self.offloading["secondary_tiers"]
        ]
        return {**self.offloading, "secondary_tiers": tiers}


def plan_legs(seed: int, requests: int, version: tuple[int, int]) -> list[Leg]:
    """Return the legs of a walk, model after model.

    Every walk has each model under each manager, each eviction policy, one to three tiers, and, under each manager, a
    leg whose weights change and one whose don't; the seed decides what meets what.
    """
    rng = random.Random(seed)
    policies = ["lru", "arc", "s3fifo"] * 2
    depths = [1, 2, 3] * 2
    rng.shuffle(policies)
    rng.shuffle(depths)
    weights = {manager: rng.sample((1, WEIGHTS, rng.choice((1, WEIGHTS))), 3) for manager in ("kvstore", "vllm")}
    pairs = [(model, manager) for model in MODELS for manager in ("kvstore", "vllm")]
    # kvstore's manager is the default, and gets two thirds.
    shares = [requests * (2 if manager == "kvstore" else 1) // 9 for _, manager in pairs]
    shares[0] += requests - sum(shares)
    return [
        _leg(rng, model, manager, share, policy, depth, weights[manager].pop(), version)
        for (model, manager), share, policy, depth in zip(pairs, shares, policies, depths, strict=True)
    ]


def plan_prompts(seed: int) -> list[list[int]]:
    """Return the prompts of a walk: some families with long common prefixes, of many lengths."""
    rng = random.Random(seed)
    families = [[rng.randrange(2, 512) for _ in range(PROMPT_TOKENS_MAX)] for _ in range(6)]
    prompts = []
    for _ in range(36):
        common = rng.choice(families)[: rng.randrange(33, PROMPT_TOKENS_MAX - 60)]
        prompts.append(common + [rng.randrange(2, 512) for _ in range(rng.choice((0, 1, rng.randrange(60))))])
    return prompts


def plan_policy(rng: random.Random) -> dict[str, Any] | None:
    """Return the offload policy of a request, mostly none."""
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


def _leg(
    rng: random.Random,
    model: str,
    manager: str,
    requests: int,
    policy: str,
    depth: int,
    weights: int,
    version: tuple[int, int],
) -> Leg:
    # The primary tier holds the blocks of a few prompts, the first tier some more, so that all of them evict.
    blocks = rng.choice((36, 60, 120))
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
        # vLLM's manager knows two policies.
        "eviction_policy": policy if manager == "kvstore" or policy != "s3fifo" else "lru",
        "secondary_tiers": [{**tier, "reset": "keep" if weights == 1 else "forget"} for tier in tiers[:depth]],
    }
    if model == "dense":
        offloading["blocks_per_chunk"] = rng.choice((1, 2, 4))
    if rng.random() < 0.5:
        offloading["canonical_layout"] = False
    if version >= (0, 33):
        offloading["sync_load_budget_bytes"] = rng.choice((0, 1 << 20, 1 << 30))
    llm: dict[str, Any] = {
        "num_gpu_blocks_override": FLOOR_BLOCKS[model],
        "max_num_batched_tokens": rng.choice((128, 256)),
        "scheduling_policy": rng.choice(("fcfs", "priority")),
    }
    if model != "mamba" and rng.random() < 0.5:
        llm["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    return Leg(rng.randrange(1 << 30), model, manager, requests, offloading, llm, weights, rng.random() < 0.5)
