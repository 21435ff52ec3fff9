"""Calls of the CUDA runtime, with a library that has its functions and no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvstore.transfer.pinning import copy_rows, loaded_cudart
from tests.transfer.streams import FakeCuda


def test_rows_that_lie_apart_are_copied() -> None:
    """Pitches and widths are in bytes for any word size; bytes between the rows stay unchanged."""
    source = torch.arange(60, dtype=torch.int32).reshape(5, 12)
    target = torch.zeros(5, 8, dtype=torch.int32)
    fake = FakeCuda()
    with fake.stream(fake.compute):
        copy_rows(fake, target[:, 1:4], source[:, 2:5], fake.compute)
    assert torch.equal(target[:, 1:4], source[:, 2:5])
    assert not target[:, 0].any() and not target[:, 4:].any()


def test_a_refused_copy_fails_the_batch_and_leaves_no_error() -> None:
    """The error is raised at the call, and cleared in the runtime, where torch would find it later."""
    asked: list[int] = []
    refusing = SimpleNamespace(cudaMemcpy2DAsync=lambda *_: 11, cudaGetLastError=lambda: asked.append(11) or 11)
    matrix = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="code 11"):
        copy_rows(refusing, matrix, matrix, SimpleNamespace(cuda_stream=77))
    assert asked == [11]


def test_without_cuda_there_is_no_runtime() -> None:
    """A process that has not loaded a CUDA runtime gets none from elsewhere."""
    if torch.version.cuda is None:
        assert loaded_cudart() is None
