"""The I/O side's runtime: its host (loop and thread), messages, buffers, limits and worker threads."""
