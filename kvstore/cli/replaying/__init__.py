"""Traces of requests, and their replay through the manager and its tiers."""
