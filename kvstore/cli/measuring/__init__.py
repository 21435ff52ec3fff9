"""Measurements: systems, what is asked of them, and how it is timed and proved."""
