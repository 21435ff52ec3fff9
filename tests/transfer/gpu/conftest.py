"""Tests of the GPU are collected only where there is one: a run without a GPU neither runs nor skips them."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
