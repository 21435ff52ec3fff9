"""What the parts of the tier suite share: the configuration to test, rigs, and naming the seed."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from kvstore.namespace import Namespace
from kvstore.testing.faults import FaultPlan
from kvstore.testing.tier_rig import TierRig
from kvstore.types import BlockKey

__all__ = ["TierHarness"]


class TierHarness:
    """What a subclass of :class:`~kvstore.testing.TierTests` says of its tier.

    Attributes:
        exclusive: Whether the tier knows by itself what it holds, so that a miss needs no second step.
        persistent: Whether blocks outlive a close, found again by the same configuration.
        deletes: Whether the backend can remove.
        slot_bytes: Length of a slot.
        slots: How many.
        timeout_s: For everything that is waited for.
        namespace: Of the blocks.
        rng: Seeded; fresh in each check.
    """

    exclusive: ClassVar[bool] = True
    persistent: ClassVar[bool] = True
    deletes: ClassVar[bool] = True
    slot_bytes: ClassVar[int] = 16384
    slots: ClassVar[int] = 64
    timeout_s: float = 20.0
    namespace: Namespace = Namespace({"suite": "tier"})
    rng: random.Random

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty medium (another one in each call)."""
        raise NotImplementedError

    def small_config(self, capacity_bytes: int) -> dict[str, Any] | None:
        """Return the same with a capacity; None if it can't have one."""
        return None

    def rig(
        self,
        config: dict[str, Any] | None = None,
        *,
        plan: FaultPlan | None = None,
        namespace: Namespace | None = None,
        **options: Any,
    ) -> TierRig:
        """Open a tier (over an empty medium unless given one), with faults around its backend if there is a plan.

        Deadlines that neither the configuration nor the check gives are as long as the suite waits for anything: what
        is not about them must hold on a machine that is busy.
        """
        patient = {"load_timeout": self.timeout_s, "lookup_timeout": self.timeout_s}
        return TierRig(
            {**patient, **(config or self.make_config()), **options},
            namespace=namespace or self.namespace,
            slot_bytes=self.slot_bytes,
            slots=self.slots,
            timeout_s=self.timeout_s,
            plan=plan,
        )

    def keys(self, count: int) -> list[BlockKey]:
        """Return new keys."""
        return [self.rng.randbytes(32) for _ in range(count)]
