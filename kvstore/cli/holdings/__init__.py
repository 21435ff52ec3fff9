"""Inspecting, verifying, cleaning and archiving the blocks on a tier's medium, beside running engines. No output."""
