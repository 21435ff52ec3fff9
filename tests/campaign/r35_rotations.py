"""R35: tiers serve again within ten seconds after each secret, certificate, full disk or killed server is mended.

Method: tiers on real Redis, S3 and peer servers and on a small disk, in one process that goes on; in random order
servers get other passwords, keys or certificates and restart, or the disk is filled; then the files change, or the
disk is freed, and stores and loads have to succeed again.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from tests.backends.rotations import QUICK, QUICK_CASES, SLOW_CASES, by_link
from tests.campaign.program import failed, not_run, passed, rounds
from tests.disk.mounts import ext4, filled
from tests.peer import serving as peers

BACK_S: Final = 10.0
"""Time after which ten operations in a row have to succeed."""
CASES: Final = {**QUICK_CASES, "s3-files-direct": SLOW_CASES["s3-files-direct"]}


class Tier:
    """A tier, and whether it serves.

    Args:
        name: For the report.
        options: Of the tier.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self._is_peer = options["backend"] == "peer"
        self._numbers = itertools.count()
        self.rig = TierRig(
            {**options, **QUICK}, namespace=Namespace(peers.FIELDS), slot_bytes=peers.SLOT_BYTES, slots=4, timeout_s=60
        )

    def works(self) -> bool:
        """Return whether a new block can be stored and loaded, or one of a peer be loaded."""
        number = next(self._numbers)
        if self._is_peer:
            return self.rig.load([peers.key_of(number % peers.SLOTS)]).success
        key = b"block-%d" % number
        return self.rig.store([key]).success and self.rig.load([key]).success

    def back_s(self) -> float:
        """Return the time until ten operations in a row have succeeded."""
        began, row = time.monotonic(), 0
        while row < 10:
            row = row + 1 if self.works() else 0
            if time.monotonic() > began + 6 * BACK_S:
                failed(f"{self.name} did not recover in {6 * BACK_S:.0f} s")
        return time.monotonic() - began


def go_through(seed: int) -> str:
    """Go through the events; return the figure."""
    choose, slowest, name_of_slowest = random.Random(seed), 0.0, ""
    with tempfile.TemporaryDirectory(prefix="kvstore-r35-") as folder, ExitStack() as stack:
        work, events = Path(folder), list[tuple[Tier, Callable[[], None]]]()
        for name, case in CASES.items():
            home, files = work / name, work / f"{name}-files"
            home.mkdir()
            files.mkdir()
            rotation = stack.enter_context(case(home, files, by_link))
            tier = Tier(name, dict(rotation.options))
            stack.enter_context(tier.rig)
            events.append((tier, lambda tier=tier, rotation=rotation, files=files: _rotate(tier, rotation, files)))
        point = stack.enter_context(ext4(work))
        disk = Tier("disk", {"backend": "file", "path": str(point / "kv"), "capacity": "16MiB", "reserve": "8MiB"})
        stack.enter_context(disk.rig)
        events += [(disk, partial(_fill, disk, point))] * 2
        for tier, _ in events:
            tier.back_s()
        choose.shuffle(events)
        for tier, event in events:
            event()
            took = tier.back_s()
            print(f"{tier.name}: back after {took:.1f} s", flush=True)
            if took > BACK_S:
                failed(f"seed {seed}: {tier.name} was back after {took:.1f} s")
            slowest, name_of_slowest = max((slowest, name_of_slowest), (took, tier.name))
        for tier, _ in events:
            if not all(tier.works() for _ in range(10)):
                failed(f"seed {seed}: {tier.name} does not work in the end")
    return f"{len(events)} events, back within {slowest:.1f} s ({name_of_slowest})"


def _rotate(tier: Tier, rotation: Any, files: Path) -> None:
    new = rotation.on_server()
    deadline = time.monotonic() + 60
    while tier.works():
        if time.monotonic() > deadline:
            failed(f"{tier.name}: the old files still work")
    by_link(files, new)


def _fill(tier: Tier, point: Path) -> None:
    with filled(point):
        for _ in range(20):
            tier.works()


if __name__ == "__main__":
    if os.geteuid():
        not_run("needs root, to mount a small disk")
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
    for seed in rounds():
        figure = go_through(seed)
    passed(figure)
