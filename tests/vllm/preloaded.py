"""Run a Python program that starts vLLM several times: vLLM is imported once, and each start is a fork.

    python -m tests.vllm.preloaded PROGRAM ARGUMENTS...

The import takes most of the time of a start with a tiny model: ten seconds of a core in each server, and again in each
process of an engine. A start is unchanged otherwise: the same arguments, environment, session and pipes.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

_OF_CHILD = ("p2cread", "c2pwrite", "errwrite")
_OF_PARENT = ("p2cwrite", "c2pread", "errread")
"""Ends of the pipes to and from a child, as ``Popen`` names them: input, output and errors."""


class ForkingPopen(subprocess.Popen[Any]):
    """``Popen`` that forks this process to run Python programs and modules; ``taskset`` may precede them.

    Forks use it, too: vLLM inspects each class of models in a process that it starts.
    """

    def _execute_child(self, *arguments: Any) -> None:
        execute = super()._execute_child
        bound = inspect.signature(execute).bind(*arguments).arguments
        command, cores = list(bound["args"]), None
        if command[:2] == ["taskset", "--cpu-list"]:
            cores, command = {int(core) for core in command[2].split(",")}, command[3:]
        is_program = command[0] == sys.executable and (command[1] == "-m" or command[1].endswith(".py"))
        # A fork copies one thread only.
        if not is_program or len(os.listdir("/proc/self/task")) > 1:
            execute(*arguments)
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if not self.pid:
            os.sched_setaffinity(0, cores or os.sched_getaffinity(0))
            os._exit(_run_child(command[1:], bound))
        self._child_created = True
        self._close_pipe_fds(
            *(bound[end] for end in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def _run_child(command: list[str], bound: dict[str, Any]) -> int:
    """Run a program in this fork; return its exit status."""
    try:
        if bound["start_new_session"]:
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for standard, end in enumerate(_OF_CHILD):
            if bound[end] != -1:
                os.dup2(bound[end], standard)
        for descriptor in {bound[end] for end in _OF_PARENT} - {-1}:
            os.close(descriptor)  # Otherwise it would never read the end of its input.
        if bound["env"] is not None:
            os.environ.clear()
            os.environ.update(bound["env"])
        tempfile.tempdir = None  # It follows the environment.
        fork_engines()
        _run(command)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        # Not by exit functions, which include those of the program that started this one.
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0


def fork_engines() -> None:
    """Let vLLM fork the processes of its engines; on a CPU it would spawn them."""
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def import_vllm() -> None:
    """Import the modules that each engine imports; none starts a thread."""
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvstore.vllm.plugin
    import kvstore.vllm.spec  # noqa: F401

    inspect_models_here()
    gc.collect()
    gc.freeze()  # Engines don't examine these objects again and again.


def inspect_models_here() -> None:
    """Let vLLM inspect each class of models in its own process, and not in one that imports vLLM again."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect_: inspect_()


if __name__ == "__main__":
    # Read by libraries when they are imported.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    import vllm.entrypoints.openai.api_server  # noqa: F401
    from tqdm import tqdm

    import_vllm()
    tqdm.monitor_interval = 0  # Its thread would prevent forks.
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    _run(sys.argv[1:])
