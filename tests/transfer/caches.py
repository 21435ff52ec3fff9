"""KV caches of simulated ranks, and the expected effect of a transfer, byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvstore.primary import (
    GroupLayout,
    KVLayout,
    LayerLayout,
    RankPlan,
    Region,
    attention_layer,
    latent_layer,
    opaque_layer,
)
from kvstore.runtime.messages import JobKind
from kvstore.transfer import BlockCopies, Transfer

Bytes = npt.NDArray[np.uint8]


def layers() -> st.SearchStrategy[LayerLayout]:
    """Layers of every kind, small, with all head counts of interest."""
    attention = st.builds(
        attention_layer,
        st.just("layer"),
        kv_heads=st.sampled_from((1, 2, 4, 8)),
        key_bytes=st.sampled_from((1, 2, 4, 8)),
        value_bytes=st.none() | st.sampled_from((2, 4)),
        block_tokens=st.sampled_from((1, 2, 4)),
        order=st.sampled_from(("nhd", "hnd")),
        split=st.booleans(),
    )
    latent = st.builds(latent_layer, st.just("layer"), token_bytes=st.integers(1, 9), block_tokens=st.integers(1, 4))
    return attention | latent | st.builds(opaque_layer, st.just("layer"), page_bytes=st.integers(1, 16))


def layouts() -> st.SearchStrategy[KVLayout]:
    """Layouts of one to three groups, with one to three blocks per slot."""

    def make(groups: list[list[LayerLayout]], blocks_per_slot: int) -> KVLayout:
        named = [
            tuple(LayerLayout(f"g{g}.l{i}", one.kind, one.kv_heads, one.parts) for i, one in enumerate(group))
            for g, group in enumerate(groups)
        ]
        return KVLayout(tuple(GroupLayout(group, 4) for group in named), blocks_per_slot)

    return st.builds(
        make, st.lists(st.lists(layers(), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 3)
    )


def random_bytes(rng: np.random.Generator, *shape: int) -> Bytes:
    """Random bytes of a shape."""
    return rng.integers(0, 256, shape, dtype=np.uint8)


def make_cache(
    plan: RankPlan, blocks: int, rng: np.random.Generator, padding: Sequence[int] = (0,)
) -> dict[str, Bytes]:
    """A cache of random bytes: a separate allocation for each layer, its pages padded by one of ``padding`` bytes."""
    cache: dict[str, Bytes] = {}
    for layer in (one for group in plan.groups for one in group):
        pad = int(rng.choice(padding))
        cache[layer.layer] = random_bytes(rng, blocks, layer.local_bytes + pad)[:, : layer.local_bytes]
    return cache


def random_copies(plan: RankPlan, blocks: int, slots: int, rng: np.random.Generator) -> list[BlockCopies]:
    """Some blocks of every group, in random order, at places of slots used by that group alone."""
    free = rng.permutation(slots)
    copies: list[BlockCopies] = []
    for group, mine in enumerate(np.array_split(free, len(plan.groups))):
        places = [(slot, place) for slot in mine for place in range(plan.blocks_per_slot)]
        count = int(rng.integers(0, min(len(places), blocks) + 1))
        chosen = [places[i] for i in rng.permutation(len(places))[:count]]
        copies.append(
            BlockCopies(
                group,
                rng.permutation(blocks)[:count].astype(np.int64),
                np.array([slot for slot, _ in chosen], dtype=np.int64),
                np.array([place for _, place in chosen], dtype=np.int64),
            )
        )
    return copies


def expected(
    plan: RankPlan, cache: dict[str, Bytes], rows: Bytes, copies: Sequence[BlockCopies], kind: JobKind
) -> tuple[dict[str, Bytes], Bytes, int]:
    """Cache, slots and copied bytes after a batch, from the layout's definitions alone."""
    cache, rows, size = {name: pages.copy() for name, pages in cache.items()}, rows.copy(), 0
    for one in copies:
        for block, slot, place in zip(one.blocks, one.slots, one.places, strict=True):
            for layer in plan.groups[one.group]:
                turn = (slot * plan.blocks_per_slot + place) % layer.writers
                if kind is JobKind.STORE and turn != layer.writer_index:
                    continue
                begin = layer.slot_offset + place * layer.block_bytes
                for local, canonical, length in (f for run in layer.runs for f in run.fragments()):
                    inside = slice(local, local + length)
                    outside = slice(begin + canonical, begin + canonical + length)
                    if kind is JobKind.STORE:
                        rows[slot, outside] = cache[layer.layer][block, inside]
                    else:
                        cache[layer.layer][block, inside] = rows[slot, outside]
                    size += length
    return cache, rows, size


def run(transfer: Transfer, copies: Sequence[BlockCopies], kind: JobKind) -> int:
    """Copy a batch and return the number of bytes that it reports."""
    handle = transfer.submit(copies, kind)
    assert transfer.wait(60)
    (result,) = transfer.poll()
    assert (result.handle, result.kind, result.error) == (handle, kind, "")
    assert result.success
    assert result.seconds >= 0
    return result.size_bytes


def check_batches(
    transfer: Transfer,
    plan: RankPlan,
    pages: Callable[[], dict[str, Bytes]],
    region: Region,
    rng: np.random.Generator,
    kinds: Sequence[JobKind] = (JobKind.STORE, JobKind.LOAD),
) -> None:
    """Copy random batches between all slots and a cache as ``pages`` returns it; compare all bytes of both."""
    rows, blocks = region.rows(), min(map(len, pages().values()))
    for kind in kinds:
        copies = random_copies(plan, blocks, len(rows), rng)
        want_cache, want_rows, want_bytes = expected(plan, pages(), rows, copies, kind)
        assert run(transfer, copies, kind) == want_bytes
        assert (rows == want_rows).all()
        for name, found in pages().items():
            assert (found == want_cache[name]).all(), name
