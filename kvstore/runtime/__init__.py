"""The I/O side's runtime: its host (loop and thread), messages, buffers, limits and worker threads."""

LOG_LINE = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
"""Format of log lines in engines and I/O processes, which share a stream."""
