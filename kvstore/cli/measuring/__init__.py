"""Measurements: systems, workloads, timing and verification."""
