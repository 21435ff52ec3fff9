"""``kvstore-bench record``: a trace of the requests of running engines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec

from kvstore.cli.command_line import Argument, Exit, Option, Typer
from kvstore.cli.exit_codes import ExitCode
from kvstore.cli.measuring.stopping import Stopping
from kvstore.cli.output_file import OutputError, check_output
from kvstore.cli.replaying.recorder import Recorder
from kvstore.cli.reporting.quantities import duration_option
from kvstore.cli.reporting.terminal import say

__all__ = ["add_commands"]

_SocketPath = Annotated[
    Path, Argument(metavar="SOCKET", help="Path of the socket to create: the engines' trace_socket.")
]
_Out = Annotated[Path, Option("--out", "-o", metavar="FILE", help="The trace; replaced if it exists.")]
_Duration = Annotated[
    str | None, Option("--duration", "-d", metavar="TIME", help="Time to record, such as 1h. Default: until Ctrl-C.")
]
_Requests = Annotated[int | None, Option("--requests", metavar="N", help="Number of requests to record.", min=1)]


def add_commands(app: Typer) -> None:
    """Add the command."""
    app.command("record")(record)


def record(
    path: _SocketPath, out: _Out = Path("trace.jsonl"), duration: _Duration = None, requests: _Requests = None
) -> None:
    """Record the requests of running engines, for 'replay'.

    The trace has salted hashes of blocks, and times. Engines need {"tiering": {"trace_socket": SOCKET}}. They send
    requests only while this command runs.
    """
    check_output(out, "--out")
    ends_at = time.monotonic() + float(duration_option(duration, "--duration")) if duration else float("inf")
    encoder = msgspec.json.Encoder()
    count = 0
    try:
        with Stopping() as stopping, Recorder(path) as recorder, out.open("wb", buffering=0) as file:
            say(f"Recording to {str(out)!r}. Ctrl-C ends it.")

            def is_over() -> bool:
                return stopping() or time.monotonic() >= ends_at or count == requests

            for request in recorder.requests(is_over):
                file.write(encoder.encode(request) + b"\n")
                count += 1
    except OSError as error:
        raise OutputError(
            f"--out {str(out)!r} can't be written: {error.strerror}. The file has {count} requests."
        ) from error
    if recorder.lost or recorder.refused:
        say(f"Lost: {recorder.lost} requests came faster than they were recorded; {recorder.refused} were not usable.")
    if not count:
        say("No request came. Give the engines' trace_socket, and send requests of at least one full block.")
        raise Exit(ExitCode.FAILED)
    say(f"{count} requests. Replay them: kvstore-bench replay {out} --block-tokens {recorder.block_tokens}")
