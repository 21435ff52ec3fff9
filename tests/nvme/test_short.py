"""Records shorter than a slot, down to less than a header: they come back as they were put, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.codec.record import HEADER_BYTES
from kvstore.types import Outcome
from tests.nvme.rig import PAYLOAD, opened, room_for


@pytest.mark.parametrize(
    "size_bytes", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, 4096, HEADER_BYTES + PAYLOAD]
)
async def test_any_length_comes_back(tmp_path: Path, size_bytes: int) -> None:
    """A record in one buffer of any length has the same bytes when it is read."""
    async with opened(tmp_path / "drive", room_for(4)) as rig:
        key = rig.maker.key()
        record = bytes(range(1, 252)) * (size_bytes // 251 + 1)
        record = record[:size_bytes]
        assert list(await rig.backend.put([RecordWrite(key, (memoryview(record),))])) == [Outcome.OK]
        header, payload = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(PAYLOAD))
        read = RecordRead(key, (header, payload))
        assert list(await rig.backend.get_into([read])) == [Outcome.OK]
        assert (bytes(header) + bytes(payload))[: read.filled_bytes][:size_bytes] == record[: read.filled_bytes]
        assert read.filled_bytes >= size_bytes
