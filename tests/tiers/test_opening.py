"""Opening a tier over a program's own memory."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import ConfigError, Namespace, Outcome, open_tier
from kvstore.testing.tier_rig import TierRig


@pytest.mark.parametrize("memory", [b"\0" * 8192, "text", 8192])
def test_memory_that_can_not_be_written_is_refused(memory: Any) -> None:
    """Anything but writable memory is a configuration error with the expected type."""
    with pytest.raises(ConfigError, match=r"writable.*mmap or a bytearray"):
        open_tier({"backend": "memory"}, primary=memory, slot_bytes=4096, namespace=Namespace({}))


def test_a_tier_is_closed_at_the_end_of_a_with() -> None:
    """Any writable memory is accepted, and it may be freed after the ``with`` block."""
    memory = bytearray(8192)
    with open_tier({"backend": "memory"}, primary=memory, slot_bytes=4096, namespace=Namespace({})) as tier:
        assert tier.stats().name == "memory"
    memory.clear()  # Refused while any view exists.


def test_codecs_of_others_with_one_wire_id_keep_their_blocks_apart() -> None:
    """Tiers with different third-party codecs of the same wire id do not find each other's blocks."""
    key = b"k" * 32
    outcomes = []
    for codec, do in (("Inverted", TierRig.store), ("Mirrored", TierRig.load), ("Inverted", TierRig.load)):
        config = {"backend": "memory", "shelf": "wire-ids", "codec": [f"tests.codec.third_party:{codec}"]}
        with TierRig(config, namespace=Namespace({}), slot_bytes=4096, slots=1) as rig:
            outcomes += do(rig, [key]).outcomes
    assert outcomes == [Outcome.OK, Outcome.MISS, Outcome.OK]
