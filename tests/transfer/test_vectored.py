"""The system call that copies many pieces."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from kvstore.transfer import vectored
from kvstore.transfer.vectored import PIECES_MAX, copy_pieces, is_available


def pieces(base: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return pieces of an array's memory."""
    return np.stack([base.ctypes.data + offsets, lengths], axis=1).astype(np.uint64)


@pytest.mark.parametrize("count", [0, 1, PIECES_MAX, PIECES_MAX + 1, 5 * PIECES_MAX])
def test_pieces_of_all_lengths(count: int) -> None:
    """Any number of pieces, of unequal lengths, also within shared memory."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, 50, count)
    shared = mmap.mmap(-1, 64 * max(count, 1))
    source, target = np.frombuffer(shared, np.uint8), np.zeros(64 * max(count, 1), np.uint8)
    source[:] = rng.integers(0, 256, len(source))
    places = rng.permutation(count) * 64
    assert copy_pieces(pieces(target, np.arange(count) * 64, lengths), pieces(source, places, lengths))
    for i in range(count):
        got = target[i * 64 : (i + 1) * 64]
        assert (got[: lengths[i]] == source[places[i] : places[i] + lengths[i]]).all()
        assert not got[lengths[i] :].any()
    del source
    shared.close()


def test_calls_are_cut_below_the_kernels_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that exceed the limit together are copied in several calls."""
    monkeypatch.setattr(vectored, "_CALL_BYTES_MAX", 100)
    source, target = np.arange(250, dtype=np.uint8), np.zeros(250, np.uint8)
    offsets, lengths = np.arange(5) * 50, np.full(5, 50)
    asked = []
    assert copy_pieces(pieces(target, offsets, lengths), pieces(source, offsets, lengths), lambda: not asked.append(1))
    assert len(asked) == 3
    assert (source == target).all()


def test_it_stops_when_told() -> None:
    """After the callback has returned false, nothing is copied."""
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    one = np.array([8])
    assert not copy_pieces(pieces(target, one * 0, one), pieces(source, one * 0, one), lambda: False)
    assert not target.any()


def test_memory_that_is_not_there_is_an_error() -> None:
    """An unmapped address is an OSError, not a crash, and so is a copy cut short by one."""
    target = np.zeros(16, np.uint8)
    good, bad = pieces(target, np.array([0]), np.array([8])), np.array([[4096, 8]], np.uint64)
    with pytest.raises(OSError, match="moved -1 of 8"):
        copy_pieces(good, bad)
    two = np.concatenate([pieces(target, np.array([8]), np.array([8])), bad])
    with pytest.raises(OSError, match="moved 8 of 16"):
        copy_pieces(pieces(target, np.array([0, 0]), np.array([8, 8])), two)


def test_availability_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is available where these tests run, but not if the C library lacks it or the kernel refuses it."""
    assert is_available()
    monkeypatch.setattr(vectored, "_CALL", lambda *_: -1)
    assert not is_available()
    monkeypatch.setattr(vectored, "_CALL", None)
    assert not is_available()
