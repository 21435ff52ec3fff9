"""Roots of the disk tier filled with blocks, and the paths of their files."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvstore.backends.disk.layout import FRAME_BYTES, JOURNAL_HEADER_BYTES, RECORD
from kvstore.types import BlockKey
from tests.disk.rig import NAMESPACE, Rig, clone, opened

FRAME = FRAME_BYTES + RECORD.itemsize
"""Length of a frame with one record."""


def home(root: Path) -> Path:
    """Return the directory of the only owner."""
    (found,) = [path for path in (root / NAMESPACE.hex).iterdir() if path.is_dir()]
    return found


def journal(root: Path) -> Path:
    """Return the journal that is being written."""
    return max(home(root).glob("journal.*"))


def frame_ends(content: bytes) -> list[int]:
    """Return the end offsets of a journal's frames."""
    ends = [JOURNAL_HEADER_BYTES]
    while ends[-1] + FRAME_BYTES <= len(content):
        count = int.from_bytes(content[ends[-1] + 4 : ends[-1] + 8], "little")
        ends.append(ends[-1] + FRAME_BYTES + count * RECORD.itemsize)
    assert ends[-1] == len(content)
    return ends


async def filled(root: Path, count: int = 20) -> dict[BlockKey, bytes]:
    """Fill a directory by single puts, one frame each, and leave the directory as a kill would."""
    live = root.with_name(root.name + "-live")
    async with opened(live, "64MiB") as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(count):
            values |= await rig.put_new(1)
        clone(live, root)
    shutil.rmtree(live)
    return values


async def proved(rig: Rig, values: dict[BlockKey, bytes]) -> int:
    """Check that every block found is right and that scan and lookups agree; return the number of blocks found."""
    await rig.session.recovered.wait()
    got = await rig.get(list(values))
    for payload, back in zip(values.values(), got, strict=True):
        assert back in (None, payload)
    found = {key for key, back in zip(values, got, strict=True) if back is not None}
    assert await rig.scanned() == found
    return len(found)
