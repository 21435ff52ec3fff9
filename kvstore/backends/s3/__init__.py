"""Blocks as objects on AWS S3, or anything that speaks its protocol."""

from kvstore.backends.s3.backend import S3Backend
from kvstore.backends.s3.config import S3Config

__all__ = ["S3Backend", "S3Config"]
