"""The parts of a tier's I/O half that belong to one epoch, as they depend on the namespace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.backends.base import Backend
from kvstore.config import TierConfig
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import SlotBuffers
from kvstore.tiers.block_mover import BlockMover
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.naming import Naming
from kvstore.tiers.refused import RefusedRecords
from kvstore.types import BlockKey

__all__ = ["EpochParts"]


class EpochParts:
    """Made when an epoch begins, closed when it has ended.

    Args:
        backend: Where the records are.
        config: The tier's configuration.
        namespace: Namespace of the base epoch.
        slot_bytes: Length of a slot.
        on_put: Called with the blocks that are on the medium from now on.
        epoch: Name of the epoch.
        primary: The primary tier's memory.

    Raises:
        ConfigError: The codecs can't be used.

    Attributes:
        epoch: Name of the epoch.
        namespace: Namespace of its blocks.
        naming: Maps keys to keyed names and back.
        refused: Records that can't be read here.
        mover: Moves blocks between slots and records.
    """

    def __init__(
        self,
        backend: Backend,
        config: TierConfig,
        namespace: Namespace,
        slot_bytes: int,
        on_put: Callable[[Sequence[BlockKey]], None],
        epoch: str,
        primary: memoryview,
    ) -> None:
        self.epoch = epoch
        self.namespace = namespace.of_epoch(epoch)
        # First what may be refused, then what holds on to the primary tier.
        codecs = TierCodecs(config.codec, self.namespace)
        slots = SlotBuffers(primary, slot_bytes)
        self.naming = Naming(codecs.chain.seal.names if codecs.chain.seal else None)
        self.refused = RefusedRecords()
        self.mover = BlockMover(
            backend, self.namespace, slots, int(config.inflight_bytes), on_put, codecs, self.refused
        )

    def close(self) -> None:
        """Release every buffer; only when nothing moves. Idempotent."""
        self.mover.close()
