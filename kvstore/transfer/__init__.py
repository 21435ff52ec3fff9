"""Copies between the engine's KV cache and the primary tier.

The interface and the copies within host memory are here. ``kvstore.transfer.cuda`` has those to and from a GPU; it
needs torch, and is imported by its own name.
"""

from kvstore.transfer.base import BlockCopies, Transfer, TransferResult
from kvstore.transfer.host import HostTransfer

__all__ = ["BlockCopies", "HostTransfer", "Transfer", "TransferResult"]
