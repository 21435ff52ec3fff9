"""Blocks on drives: segments of equal slots, each described by a table that is written in place."""
