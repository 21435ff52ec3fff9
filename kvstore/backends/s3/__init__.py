"""Blocks as objects on AWS S3, or anything that speaks its protocol."""
