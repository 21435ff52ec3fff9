"""Real vLLM engines for tests: started in separate sessions, called over a socket, killed by SIGKILL."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import select
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.serving import kill_session, session_pids
from kvstore.testing import eventually

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 32

_CHILD = Path(__file__).with_name("engine_child.py")


class EngineError(Exception):
    """The engine did not start or answer; the text is its log."""


class Engine:
    """One engine.

    Args:
        model: Directory of the model.
        log: File for the engine's output.
        offloading: ``kv_connector_extra_config``, or None.
        in_process: Whether scheduler and model run in the process of the caller of ``LLM`` (vLLM's mode for tests), or
            in separate processes (vLLM's default).
        events: Whether KV cache events are enabled; or ``--kv-events-config``.
        llm: Additional arguments of ``LLM``.
        transfer: Additional arguments of ``KVTransferConfig``.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        offloading: dict[str, Any] | None = None,
        in_process: bool = True,
        events: bool | dict[str, Any] = False,
        llm: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        self.log = log
        self.engine_id = f"kvstore-test-{os.getpid()}-{uuid.uuid4().hex}"
        options = {"model": str(model), "offloading": offloading, "engine_id": self.engine_id, "events": events}
        options |= {"llm": llm or {}, "transfer": transfer or {}, "environment": _environment(in_process, log.parent)}
        ours, theirs = socket.socketpair()
        ours.settimeout(500)
        with theirs, log.open("ab") as output:
            socket.send_fds(_forking(), [b"+"], [theirs.fileno(), output.fileno()])
        with ours:
            self._process = _Process(ours)
            self._channel = ours.makefile("rw")
        self._channel.write(json.dumps(options) + "\n")
        self._channel.flush()
        self._answer()

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of ``engine_child.Engine``."""
        self._channel.write(json.dumps([name, args]) + "\n")
        self._channel.flush()
        return self._answer()

    def ask(self, *prompts: Sequence[int]) -> list[dict[str, Any]]:
        """Answer prompts; return the tokens and cached tokens of each."""
        answers: list[dict[str, Any]] = self.call("ask", [list(prompt) for prompt in prompts])
        return answers

    def kill(self) -> None:
        """End all of the engine's processes by SIGKILL and wait for them."""
        kill_session(self._process)
        with contextlib.suppress(OSError):
            self._channel.close()

    def close(self) -> None:
        """Let the engine end by itself, as ``vllm serve`` does on request; kill it if it does not."""
        with contextlib.suppress(OSError):
            self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            self._process.wait(30)
            # Then its resource tracker removes the shared memory of processes that vLLM has killed.
            eventually(lambda: not session_pids(self._process.pid), 30, "the end of its other processes")
        self.kill()

    @property
    def shared_memory(self) -> list[str]:
        """Files of the engine's offload region in /dev/shm."""
        return [name for name in os.listdir("/dev/shm") if self.engine_id in name]

    def text(self) -> str:
        """The engine's output."""
        return self.log.read_text(errors="replace")

    def _answer(self) -> Any:
        try:
            line = self._channel.readline()
        except TimeoutError:
            line = ""
        if not line or "error" in (answer := json.loads(line)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self.kill()
            raise EngineError(f"{line}\n{self.text()}")
        return answer["result"]


class _Process:
    """The first process of an engine, not a child of this one, with the methods of ``Popen`` that callers use."""

    def __init__(self, reports: socket.socket) -> None:
        pid, self._descriptors, *_ = socket.recv_fds(reports, 8, 1)
        if not pid:
            raise EngineError("the process that engines are forked from has ended")
        self.pid = int(pid)

    def poll(self) -> None:
        """Do nothing: the process that it was forked from collects it."""

    def wait(self, timeout: float) -> None:
        """Wait for its end."""
        if self._descriptors and not select.select(self._descriptors, [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("engine", timeout)
        while self._descriptors:
            os.close(self._descriptors.pop())


@functools.cache
def _forking() -> socket.socket:
    """Start a process that has imported vLLM, from which engines are forked; it ends when the returned socket closes.

    Its variables are those of engines which are read during imports.
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(_CHILD), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=_environment(True, Path("/nonexistent")),
        )

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


Start = Callable[..., Engine]
"""Starts an engine of the module's model; takes the named arguments of :class:`Engine`."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Return a random prompt, determined by the seed."""
    rng = random.Random(seed)
    return [rng.randrange(2, 512) for _ in range(tokens)]


def full_blocks(tokens: int) -> int:
    """Return the number of tokens that a cache can provide: those of all full blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


WATCHED = {"spec_name": "WatchedSpec", "spec_module_path": "tests.vllm.walk.blocks", "tiering": {"gate": False}}
"""Keys of ``kv_connector_extra_config`` for the calls ``watch`` and ``judge``, which compare the numbers of blocks."""


def managed(directory: Path, **more: Any) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` with kvstore's manager and a file tier that keeps its blocks at a reset."""
    tier = {"type": "file", "path": str(directory), "capacity": "1GiB", "load_timeout": 60, "reset": "keep"}
    return {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "manager": "kvstore",
        "cpu_bytes_to_use": 64 * 2**20,
        "secondary_tiers": [tier],
        **more,
    }


def _environment(in_process: bool, scratch: Path) -> dict[str, str]:
    settings = {
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        # By default vLLM binds each rank to its own cores, and refuses to start with too few.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Threads of OpenMP spin while they wait for each other.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    return {**os.environ, **settings}
