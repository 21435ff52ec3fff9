"""Cut the power of a guest at random points, again and again, and verify its disk at each next boot.

    python -m tests.campaign.power_cuts GUEST [--cycles N] [--seed S] [--only ext4-data]

GUEST is the directory that ``tests/campaign/build_guest.sh`` made. The guest is a QEMU machine (no KVM) whose page
cache is lost with it: SIGKILL of QEMU is the power cut. Bytes that reached the virtual drive stay, so it has no
volatile cache. Prints one line a cycle, and a figure as its last line.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.testing.seeds import fresh_seed

FILESYSTEMS = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"], "btrfs": ["mkfs.btrfs", "-q", "-f"]}
LEVELS = ("none", "data")
DATA_BYTES = 512 << 20
BOOT_LIMIT_S = 300
"""A guest that has not verified its disk by then has failed."""

BLOCKS_MAX = 3000
"""Blocks of one disk: no more than fit, as a block that was evicted is not lost."""


@dataclass
class Disk:
    """A disk of a guest, and the blocks that the guest reported."""

    image: Path
    filesystem: str
    durability: str
    direct: str
    reported: set[int] = field(default_factory=set)  # Blocks that were reported as stored before a cut.
    first: int = 0  # Number of the next new block.


class Failure(Exception):
    """The guest found what must not be, or did not come up."""


def cycle(guest: Path, disk: Disk, rng: random.Random) -> Counter[str]:
    """Boot, let the guest verify and store, and cut its power; return what was counted."""
    options = {"fs": disk.filesystem, "durability": disk.durability, "direct": disk.direct, "first": disk.first}
    words = " ".join(f"kv{name}={value}" for name, value in options.items())
    command = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "768", "-smp", "1", "-nographic"]
    command += ["-no-reboot", "-net", "none", "-kernel", str(guest / "vmlinuz"), "-initrd", str(guest / "initrd.gz")]
    command += ["-append", f"console=ttyS0 quiet panic=-1 random.trust_cpu=on {words}"]
    command += ["-drive", f"file={guest / 'system.img'},format=raw,if=virtio,readonly=on"]
    command += ["-drive", f"file={disk.image},format=raw,if=virtio"]
    machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert machine.stdout is not None
    found: set[int] | None = None
    # Some cuts come while the guest still verifies, most while it stores.
    cut_at = time.monotonic() + (rng.uniform(5, 40) if rng.random() < 0.1 else BOOT_LIMIT_S)
    is_early = cut_at < time.monotonic() + BOOT_LIMIT_S - 1
    text, shown, new = "", "", set[int]()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(machine.stdout, selectors.EVENT_READ)
            while (left := cut_at - time.monotonic()) > 0 and disk.first + len(new) < BLOCKS_MAX:
                if not selector.select(left):
                    continue
                got = machine.stdout.read1(65536)
                if not got:
                    raise Failure(f"the guest ended, QEMU with status {machine.wait()}: {shown}")
                piece = got.decode(errors="replace").replace("\r", "")
                text, shown = text + piece, (shown + piece)[-2000:]
                *lines, text = text.split("\n")
                for line in lines:
                    name, _, value = line.partition(" ")
                    if name == "WRONG" and json.loads(value):
                        raise Failure(f"wrong bytes in blocks {value}")
                    if name == "FOUND":
                        found = set(json.loads(value))
                        cut_at = time.monotonic() + BOOT_LIMIT_S
                    if name == "STORED" and (done := set(json.loads(value))):
                        if not new:
                            cut_at = time.monotonic() + rng.choice([rng.uniform(0, 1), rng.uniform(0, 8)])
                        new |= done
    finally:
        machine.kill()
        machine.wait()
        machine.stdout.close()
    if found is None and not is_early:
        raise Failure(f"the guest did not verify its disk within {BOOT_LIMIT_S} s: {shown}")
    if found is not None and not new:
        raise Failure(f"the guest stored nothing within {BOOT_LIMIT_S} s")
    counts = Counter(cycles=1, stored=len(new), early=int(found is None))
    if found is not None:
        lost = disk.reported - found
        counts.update(found=len(found), lost=len(lost))
        if lost and disk.durability == "data":
            raise Failure(f"{len(lost)} reported blocks are lost: {sorted(lost)[:20]}")
        disk.reported &= found
    disk.reported |= new
    # Jobs that were under way may have stored blocks that were not reported: they are verified, too.
    disk.first = max([disk.first, *new]) + 13
    disk.first -= disk.first % 6
    return counts


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.power_cuts")
    parser.add_argument("guest", type=Path)
    parser.add_argument("--cycles", type=int, default=2, help="of each filesystem and durability level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="such as ext4-data")
    args = parser.parse_args()
    rng = random.Random(seed := args.seed or fresh_seed())
    print(f"seed {seed}", flush=True)
    total: Counter[str] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvstore-power-") as directory:
        for filesystem, mkfs in FILESYSTEMS.items():
            for durability in LEVELS:
                if args.only not in f"{filesystem}-{durability}":
                    continue
                disk = Disk(Path(directory) / "data.img", filesystem, durability, rng.choice(["auto", "off"]))
                for number in range(args.cycles):
                    if number == 0 or disk.first > BLOCKS_MAX // 2:
                        disk.image.unlink(missing_ok=True)
                        disk.image.touch()
                        with disk.image.open("wb") as file:
                            file.truncate(DATA_BYTES)
                        subprocess.run([*mkfs, str(disk.image)], check=True)
                        disk.reported, disk.first = set(), 0
                    try:
                        counts = cycle(args.guest, disk, rng)
                    except Failure as error:
                        print(f"{filesystem}-{durability}-{disk.direct}, cycle {number}, seed {seed}: {error}")
                        return 1
                    total.update(counts)
                    print(f"{filesystem}-{durability}-{disk.direct} {dict(counts)}", flush=True)
    if not total["found"] and args.cycles > 1:
        print(f"no block was found after {total['cycles']} power cuts, seed {seed}")
        return 1
    print(
        f"0 wrong in {total['found']:,} blocks found after {total['cycles']} power cuts of a guest, "
        f"{total['lost']} of those without sync lost, {(time.monotonic() - started) / total['cycles']:.0f} s a cycle"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
