"""``"codec": "auto"`` in a tier: its choice over a slow link, and correct blocks with any choice."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.backends.memory import MemoryBackend
from kvstore.codec.keyring import new_document
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.testing import eventually
from kvstore.testing.tier_rig import TierRig
from kvstore.types import BlockKey, Outcome

LINK_BYTES_PER_S = 2e6
"""Far slower than any machine decodes: eight encoded blocks save 60 ms of transfer and take about 2 ms to decode,
which other processes may prolong."""
ROUNDS = 8


class SlowBackend(MemoryBackend):
    """Memory at the end of a slow link."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Take as long as the link."""
        await asyncio.sleep(sum(write.size_bytes for write in writes) / LINK_BYTES_PER_S)
        return await super().put(writes)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Take as long as the link."""
        outcomes = await super().get_into(reads)
        await asyncio.sleep(sum(read.filled_bytes for read in reads) / LINK_BYTES_PER_S)
        return outcomes


class Rig(TierRig):
    """A tier whose blocks compress to about a half, or not at all."""

    compresses = True

    def payload(self, key: BlockKey) -> bytes:
        """Return the bytes of a key's block."""
        rng = random.Random(key)
        return bytes(rng.choices(range(16), k=self.slot_bytes)) if self.compresses else rng.randbytes(self.slot_bytes)


def work(codec: Any, *, compresses: bool, rounds: int = ROUNDS) -> dict[str, float]:
    """Store and load blocks over the slow link, until all are encoded; return the tier's codec statistics."""
    config = {"backend": f"{__name__}:SlowBackend", "codec": codec}
    rig = Rig(config, namespace=Namespace({"suite": "auto"}), slot_bytes=32768, slots=8)
    rig.compresses = compresses
    with rig:
        numbers = itertools.count()

        def encodes() -> bool:
            for _ in range(rounds):
                keys = [b"%d %d" % (next(numbers), place) for place in range(8)]
                assert rig.store(keys).success
                assert rig.load(keys).success
            assert rig.tier.drain(20)
            rig.step()
            return rig.tier.stats().codec.get("auto_encodes") == 1

        eventually(encodes, 90, "the choice to encode")
        rig.tier.drain(20)
        rig.step()
        return rig.tier.stats().codec


@pytest.mark.parametrize("codec", ["auto", [{"auto": {"objective": "bytes"}}], ["auto", "SEAL"]], ids=str)
def test_blocks_that_compress_are_encoded(codec: Any, tmp_path: Path) -> None:
    """Over a slow link blocks are soon encoded, and the measurements are in the statistics, sealed or not."""
    (tmp_path / "keys").write_text(new_document())
    if "SEAL" in codec:
        codec = [*codec[:-1], {"aead": {"keys": {"file": str(tmp_path / "keys")}}}]
    stats = work(codec, compresses=True)
    # To save bytes, no measurement is needed first.
    assert (stats["auto_changes"] == 0) == ("bytes" in str(codec))
    assert stats["encoded_blocks"] >= 32
    assert 0.4 < stats["auto_ratio"] < 0.6
    assert 0 < stats["auto_link_bytes_per_s"] < 1.1 * LINK_BYTES_PER_S
    assert stats["auto_decode_bytes_per_s"] > 0


def test_blocks_that_do_not_compress_are_left_alone() -> None:
    """Random bytes are tried a few times, then no longer, however slow the link."""
    config = {"backend": f"{__name__}:SlowBackend", "codec": "auto"}
    rig = Rig(config, namespace=Namespace({"suite": "auto"}), slot_bytes=32768, slots=8)
    rig.compresses = False
    with rig:
        for number in range(ROUNDS):
            keys = [b"%d %d" % (number, place) for place in range(8)]
            assert rig.store(keys).success
            assert rig.load(keys).success
        rig.until(lambda: rig.tier.stats().codec.get("auto_encodes") == 0, "a choice")
        assert rig.tier.stats().codec["encoded_blocks"] == 0


def test_a_wrong_option_is_refused() -> None:
    """The error of a misspelled objective lists the valid ones."""
    with pytest.raises(ConfigError, match="latency"):
        work([{"auto": {"objective": "speed"}}], compresses=True, rounds=0)
