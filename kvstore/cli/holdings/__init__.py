"""Inspecting, verifying and cleaning the blocks on a tier's medium, beside running engines. No output."""
