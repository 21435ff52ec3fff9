"""Copies between the engine's KV cache and the primary tier.

This package exports the interface and the copies within host memory. Copies to and from a GPU are in
``kvstore.transfer.cuda``, which needs torch and must be imported explicitly.
"""

from kvstore.transfer.base import BlockCopies, Transfer, TransferResult
from kvstore.transfer.host import HostTransfer

__all__ = ["BlockCopies", "HostTransfer", "Transfer", "TransferResult"]
