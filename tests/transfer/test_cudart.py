"""Calls of the CUDA runtime, with a library that has its functions and no GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.transfer.cuda import CudaStreams
from kvstore.transfer.pinning import loaded_cudart


def memcpy_2d(to: int, to_pitch: int, src: int, src_pitch: int, width: int, rows: int, kind: int, stream: int) -> int:
    """Copy like cudaMemcpy2DAsync, with its arguments in order; code 1 if a pitch is shorter than a row."""
    if min(to_pitch, src_pitch) < width or kind != 4 or stream != 77:
        return 1
    for row in range(rows):
        ctypes.memmove(to + row * to_pitch, src + row * src_pitch, width)
    return 0


def streams_of(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> CudaStreams:
    """Streams whose runtime has these functions."""
    monkeypatch.setattr("kvstore.transfer.cuda.loaded_cudart", lambda: SimpleNamespace(**functions))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    streams = CudaStreams(torch.device("cuda", 0))
    assert streams.strided
    return streams


def test_rows_that_lie_apart_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitches and widths are in bytes for any word size; bytes between the rows stay unchanged."""
    source = torch.arange(60, dtype=torch.int32).reshape(5, 12)
    target = torch.zeros(5, 8, dtype=torch.int32)
    streams = streams_of(monkeypatch, cudaMemcpy2DAsync=memcpy_2d)
    streams.copy_rows(target[:, 1:4], source[:, 2:5], SimpleNamespace(cuda_stream=77))
    assert torch.equal(target[:, 1:4], source[:, 2:5])
    assert not target[:, 0].any() and not target[:, 4:].any()


def test_a_refused_copy_fails_the_batch_and_leaves_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised at the call, and cleared in the runtime, where torch would find it later."""
    asked: list[int] = []
    streams = streams_of(monkeypatch, cudaMemcpy2DAsync=lambda *_: 11, cudaGetLastError=lambda: asked.append(11) or 11)
    matrix = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="code 11"):
        streams.copy_rows(matrix, matrix, SimpleNamespace(cuda_stream=77))
    assert asked == [11]


def test_without_cuda_there_is_no_runtime() -> None:
    """A process that has not loaded a CUDA runtime gets none from elsewhere."""
    if torch.version.cuda is None:
        assert loaded_cudart() is None
