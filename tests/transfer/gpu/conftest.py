"""GPU tests are collected only if there is a GPU: a run without one neither runs nor skips them."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
