"""The command lines from a new user's view: help, versions, invalid input and its errors."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from kvstore import cli
from kvstore.cli.app import _OF_BENCH, _OF_KVSTORE, Warnings
from tests.cli.in_process import run_here
from tests.project.tree import ROOT

_COMMANDS = [*(["bench", name] for name in _OF_BENCH), *([name] for name in _OF_KVSTORE), ["bench"]]


@pytest.mark.parametrize("command", [[], *_COMMANDS], ids=" ".join)
def test_help_fits_a_terminal_and_is_whole(command: list[str]) -> None:
    """80 columns, no truncated sentence, no option value named after a Python type."""
    done = run_here(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    options, _, commands = done.stdout.partition("Commands:")
    assert "..." not in commands
    assert not re.search(r"--[a-z-]+ <(int|float|str|path)", options)


def test_both_programs_print_their_version() -> None:
    """Both programs print their version and nothing else."""
    for command in ([], ["bench"]):
        done = run_here(*command, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"kvstore {kvstore.__version__}\n", "")


def test_without_a_command_there_is_help() -> None:
    """Help goes to stderr with status 2, because no command ran."""
    done = run_here()
    assert (done.returncode, done.stdout) == (2, "")
    assert "inspect" in done.stderr


@pytest.mark.parametrize(("option", "other"), [("--hit-rate", "--prefill"), ("--prefill", "--hit-rate")])
def test_an_absurd_size_names_its_option_alone(option: str, other: str) -> None:
    """The other option is valid, and is not mentioned."""
    done = run_here("size", "--model", "config.json", option, "-5")
    assert (done.returncode, done.stdout) == (2, "")
    assert option in done.stderr and other not in done.stderr


def test_failure_is_reported_once(tmp_path: Path) -> None:
    """A library warning is not repeated by the error that follows from it."""
    tier = json.dumps({"type": "redis", "url": f"unix://{tmp_path}/none"})
    done = run_here("inspect", "--tier", tier)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count(str(tmp_path)) == 1


def test_warnings_are_printed_once_each_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The progress line stays complete; warnings beyond a readable number are omitted."""
    logger = logging.getLogger("kvstore.of.a.test")
    with Warnings("program") as warnings:
        for text in ("one", "one", "two", *map(str, range(100))):
            logger.warning("It is %s", text)
        logger.info("It is fine")
        warnings.drop("two")
        assert capsys.readouterr().err == ""
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["program: warning: It is one", "program: warning: It is 0"]
    assert 2 < len(lines) < 40
    logger.warning("It is over")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("redirect", "status"), [(">/dev/full", 1), (">&-", 0)])
def test_a_stdout_that_takes_nothing(redirect: str, status: int) -> None:
    """A full disk causes one line and status 1; a closed stdout is not an error."""
    command = f'exec "{sys.executable}" -m kvstore bench backends {redirect}'
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (status, status), done.stderr


def test_ctrl_c_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while modules load leaves no traceback."""

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


def test_without_vllm_a_command_of_engines_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM is not installed, its absence is the error, in one line."""
    monkeypatch.setitem(sys.modules, "kvstore.vllm.startup", None)
    done = run_here("check", "-t", "memory")
    assert done.returncode == 2
    assert re.fullmatch(
        r"kvstore: vLLM can't be imported \(.*\)\. Run this command in the engine's environment\.\n", done.stderr
    )
