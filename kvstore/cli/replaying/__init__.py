"""Traces of requests, and their way through the manager and its tiers."""
