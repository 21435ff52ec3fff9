"""A process that serves blocks of a primary tier (``python -m tests.peer.serving '{"port": …}'``), and its launcher."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region
from kvstore.primary.lending import Lender
from kvstore.tiers import open_tier
from tests.peer.ports import free_port
from tests.stopping import stop

SLOT_BYTES = 65536
SLOTS = 64
FIELDS = {"suite": "peer"}


def key_of(number: int) -> bytes:
    """Return the key of a served block, 0 to ``SLOTS`` - 1."""
    return b"served-%d" % number


class Serving:
    """The process, as a context manager. Blocks are a function of their keys, as in ``TierRig``."""

    def __init__(self, directory: Path, /, **options: Any) -> None:
        self.port = free_port()
        self._options = {"listen": self.address, **options}
        self._log = directory / "serving.log"
        self._process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Return the address it listens on."""
        return f"127.0.0.1:{self.port}"

    def start(self, **options: Any) -> None:
        """Start or restart the process with more options, and wait until it serves."""
        arguments = [sys.executable, "-m", "tests.peer.serving", json.dumps({**self._options, **options})]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=Path(__file__).parents[2]
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", self._log.read_text()

    def stop(self) -> None:
        """Stop the process, and wait until each of its threads has stopped."""
        stop(self._process.pid)

    def go_on(self) -> None:
        """Resume the process."""
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill()


def main() -> None:
    """Serve until standard input is closed."""
    options = json.loads(sys.argv[1])
    with Region.create(slots=SLOTS, slot_bytes=SLOT_BYTES) as region:
        primary = PrimaryTier(region.view(), SLOT_BYTES)
        keys = [key_of(number) for number in range(SLOTS)]
        for key, slot in zip(keys, primary.allocate(keys) or (), strict=True):
            with primary.row(slot) as row:
                row[:] = random.Random(key).randbytes(SLOT_BYTES)
        primary.commit(keys)
        tier = open_tier(
            {"backend": "peer", **options},
            primary=region.view(),
            slot_bytes=SLOT_BYTES,
            namespace=Namespace(FIELDS),
            lender=Lender(primary),
        )
        print("ready", flush=True)
        sys.stdin.read()
        tier.close()
        primary.close()


if __name__ == "__main__":
    main()
