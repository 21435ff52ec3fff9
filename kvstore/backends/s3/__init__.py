"""Blocks as objects on AWS S3 or an S3-compatible service.

A GET passes through five modules: ``backend`` (name, outcome), ``client`` (limits, retries, deadlines), ``direct``
(request, signature), ``wire`` (connections; bytes are moved by ``kvstore.backends.duplex``) and ``http`` (parsing, into
the slot). ``packing`` handles small blocks; ``keeper`` does the housekeeping.
"""

from kvstore.backends.s3.backend import S3Backend
from kvstore.backends.s3.config import S3Config

__all__ = ["S3Backend", "S3Config"]
