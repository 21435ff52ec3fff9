"""The maintenance commands' interface: columns, confirmations, progress, keys, third-party backends."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvstore import Namespace, SimpleBackend, TransferJob, open_tier
from kvstore.backends.base import RecordRead
from kvstore.backends.vectored import scatter
from kvstore.cli.holdings.commands import Pace
from kvstore.testing.codec_tests import memory_rise
from kvstore.types import BlockInfo, NamespaceInfo, Outcome
from tests.cli.cli import report_of, run_program
from tests.cli.in_process import run_here
from tests.project.tree import ROOT

_SLOT_BYTES = 8192
_MODEL = Namespace({"model": "some-organization/a-model-with-a-long-name-8B-Instruct"})
_KEYS = [b"key-%02d" % number for number in range(6)]


def _fill(config: dict[str, object], namespace: Namespace) -> None:
    memory = bytearray(len(_KEYS) * _SLOT_BYTES)
    with open_tier(config, primary=memory, slot_bytes=_SLOT_BYTES, namespace=namespace) as tier:
        tier.submit_store(TransferJob(1, keys=_KEYS, slots=range(len(_KEYS))))
        tier.drain()
        assert all(result.success for result in tier.get_finished())


@pytest.fixture
def tier(tmp_path: Path) -> str:
    """The JSON of a file tier with some blocks."""
    options = {"path": str(tmp_path / "tier"), "capacity": "16MiB", "reserve": 0}
    _fill({"backend": "file", **options}, _MODEL)
    return json.dumps({"type": "file", **options})


def _damage(tier: str) -> None:
    for path in Path(json.loads(tier)["path"]).rglob("*.seg"):
        data = bytearray(path.read_bytes())
        for at in range(4096, len(data), 4096 + _SLOT_BYTES):
            data[at + 100] ^= 1
        path.write_bytes(data)


def test_every_column_is_there_at_80_characters_and_in_a_pipe(tier: str) -> None:
    """The model's name wraps if there is not enough room; in a pipe each row is one line."""
    titles = {"namespace", "model", "blocks", "size", "ages", "unused", "in", "use"}
    narrow = run_here("inspect", "--tier", tier).stdout
    assert titles <= set(narrow.splitlines()[1].split())
    assert max(map(len, narrow.splitlines())) <= 80
    wide = run_here("inspect", "--tier", tier, COLUMNS="").stdout
    assert titles <= set(wide.splitlines()[1].split())
    assert _MODEL.hex[:12] in wide
    (row,) = [line for line in wide.splitlines() if line.startswith(_MODEL.hex[:12])]
    assert str(_MODEL.document()["fields"]["model"]) in row


@pytest.mark.parametrize(("pipe", "lines"), [('--keys --tier "$1" | head -1', 1), ('--tier "$1" | true', 0)])
def test_a_reader_that_leaves_is_no_failure(tier: str, pipe: str, lines: int) -> None:
    """``kvstore inspect --keys | head -1`` is no error, even if the output is shorter than a buffer."""
    command = f"set -o pipefail; {sys.executable} -m kvstore inspect {pipe}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command, "-", tier], env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", lines)


def test_a_rate_without_a_unit_is_refused(tier: str) -> None:
    """A rate without a unit is refused, because five bytes per second would take years."""
    done = run_here("scrub", "--tier", tier, "--rate", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'200MiB'" in done.stderr


def test_narrow_terminal_omits_whole_columns(tier: str) -> None:
    """A narrow terminal omits columns, but digest, blocks and size stay complete."""
    narrow = run_here("inspect", "--tier", tier, COLUMNS="40").stdout
    assert max(map(len, narrow.splitlines())) <= 40
    assert narrow.splitlines()[1].split() == ["namespace", "blocks", "size"]
    assert narrow.splitlines()[2].split()[:2] == [_MODEL.hex[:12], str(len(_KEYS))]


def test_gc_lists_candidates_with_model_and_digest(tier: str) -> None:
    """The list has the model, and in JSON the full digest."""
    time.sleep(0.01)
    dry = ("gc", "--tier", tier, "--unused-for", "0.001s", "--dry-run")
    shown = run_here(*dry, COLUMNS="").stdout
    assert str(_MODEL.document()["fields"]["model"]) in shown
    (row,) = report_of(run_here(*dry, "--json"))["rows"]
    assert (row["name"], row["blocks"]) == (_MODEL.hex, len(_KEYS))


def test_keys_can_be_listed(tier: str) -> None:
    """Keys are listed in full, one per line, and as JSON."""
    lines = run_here("inspect", "--keys", "--tier", tier).stdout.splitlines()
    assert sorted(line.split()[1] for line in lines) == [key.hex() for key in _KEYS]
    assert {line.split()[0] for line in lines} == {_MODEL.hex}
    rows = report_of(run_here("inspect", "--keys", "--json", "--tier", tier))["rows"]
    assert sorted(row["key"] for row in rows) == [key.hex() for key in _KEYS]


@pytest.mark.parametrize("command", ["gc", "scrub"])
def test_gc_without_a_terminal_requires_yes_or_dry_run(tier: str, command: str) -> None:
    """Without a terminal, ``--yes`` or ``--dry-run`` is required."""
    done = run_program(command, "--tier", tier, KVSTORE_YES="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--yes" in done.stderr


@pytest.mark.parametrize(("answer", "removed"), [("n", 0), ("y", 1)])
def test_gc_on_a_terminal_asks_before_removal_and_shows_progress(tier: str, answer: str, removed: int) -> None:
    """On a terminal the question follows the list, and ``n`` changes nothing."""
    time.sleep(0.01)
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "gc", "--tier", tier, "--unused-for", "0.001s", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "KVSTORE_YES": "0"},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    seen = b""
    while b"Remove 1 item, " not in seen:
        assert select.select([mine], [], [], 60)[0], seen
        seen += os.read(mine, 4096)
    os.write(mine, answer.encode() + b"\n")
    out, _ = process.communicate(timeout=60)
    os.close(mine)
    assert json.loads(out)["removed"]["namespaces"] == removed


def test_causes_go_to_stderr(tier: str) -> None:
    """Stdout alone has the table, and stderr alone has the causes."""
    _damage(tier)
    done = run_program("scrub", "--tier", tier)
    assert done.returncode == 3
    assert f"{len(_KEYS)} damaged, {len(_KEYS)} taken out of the way" in done.stderr
    assert "damaged" not in done.stdout


def test_pace_saves_no_unused_allowance() -> None:
    """Unused allowance is not saved up, and the deadline is checked during the sleep."""
    now, checks = [100.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    pace = Pace(100, lambda: checks.append(now[0]), clock)
    pace.spend(50)
    assert now[0] == pytest.approx(100.5)
    now[0] += 60
    pace.spend(100)
    assert now[0] == pytest.approx(161.5)
    assert len(checks) >= 10
    free = Pace(0, lambda: None, clock)
    free.spend(1 << 40)
    assert now[0] == pytest.approx(161.5)


def test_a_rate_is_taken(tier: str) -> None:
    """Both commands accept a rate; a gc with a rate removes blocks in small batches."""
    assert run_here("scrub", "--rate", "100MiB", "--tier", tier).returncode == 0
    time.sleep(0.01)
    done = run_here("gc", "--rate", "2000", "--unused-for", "0.001s", "--json", "--tier", tier)
    assert report_of(done)["removed"] == {"stale": 0, "namespaces": 1, "blocks": len(_KEYS)}
    assert run_here("gc", "--rate", "-1", "--tier", tier).returncode == 2


class ListedBackend(SimpleBackend):
    """A third-party backend with a scan."""

    name = "listed"
    records: ClassVar[dict[bytes, bytes]] = {}

    async def put_one(self, key, buffers):  # type: ignore[no-untyped-def]
        record = b"".join(buffers)
        return self.records.setdefault(self.namespace.digest + key, record) is record

    async def get_one_into(self, key, buffers):  # type: ignore[no-untyped-def]
        record = self.records.get(self.namespace.digest + key)
        return None if record is None else scatter(record, buffers)

    async def exists_one(self, key):  # type: ignore[no-untyped-def]
        """Look up."""
        return self.namespace.digest + key in self.records

    async def delete_one(self, key):  # type: ignore[no-untyped-def]
        return self.records.pop(self.namespace.digest + key, None) is not None

    async def scan(self):  # type: ignore[no-untyped-def]
        """List."""
        for name, record in list(self.records.items()):
            if name.startswith(self.namespace.digest):
                yield BlockInfo(name[32:], len(record))


class HostileBackend(ListedBackend):
    """A backend that lists whatever a test has set."""

    listed: ClassVar[list[Any]] = []
    scanned: ClassVar[list[Any]] = []

    async def namespaces(self):  # type: ignore[no-untyped-def]
        """List namespaces."""
        return self.listed

    async def scan(self):  # type: ignore[no-untyped-def]
        """List blocks, or raise."""
        for block in self.scanned:
            if isinstance(block, Exception):
                raise block
            yield block


class WrongOutcomes(HostileBackend):
    """A backend that answers a read with whatever a test has set."""

    outcomes: ClassVar[Any] = None

    async def get_into(self, reads: Sequence[RecordRead]) -> Any:
        return self.outcomes


class PatchyBackend(HostileBackend):
    """A backend that can't read every second block, and lacks the others."""

    async def get_into(self, reads: Sequence[RecordRead]) -> list[Outcome]:
        return [Outcome.IO_ERROR if read.key[0] % 2 else Outcome.MISS for read in reads]


class UnclosableBackend(HostileBackend):
    """A backend that fails to close."""

    async def close(self) -> None:
        raise ValueError("at the end")


def hostile(kind: type[HostileBackend], scanned: list[Any], listed: Sequence[Any] = (NamespaceInfo("ab" * 32),)) -> str:
    """Set the lists of hostile backends; return the JSON of a tier with one."""
    HostileBackend.listed, HostileBackend.scanned = list(listed), scanned
    return json.dumps({"backend": f"{__name__}:{kind.__name__}"})


@pytest.mark.parametrize(
    ("listed", "scanned"),
    [
        ([None], []),
        ([NamespaceInfo("../..")], []),
        ([NamespaceInfo("ab" * 32, used_at=float("nan"))], []),
        ([NamespaceInfo("ab" * 32, used_at="yesterday")], []),
        ([NamespaceInfo("ab" * 32, ["model"])], []),
        ([NamespaceInfo("ab" * 31)], []),
        ([NamespaceInfo("ab" * 32)], [ValueError("in the middle")]),
        ([NamespaceInfo("ab" * 32)], [None]),
        ([NamespaceInfo("ab" * 32)], [BlockInfo(b"", 1)]),
        ([NamespaceInfo("ab" * 32)], [BlockInfo(bytes(65), 1)]),
        ([NamespaceInfo("ab" * 32)], [BlockInfo(5, 1)]),
        ([NamespaceInfo("ab" * 32)], [BlockInfo(b"k", 1.5)]),
        ([NamespaceInfo("ab" * 32)], [BlockInfo(b"k", -1)]),
        ([NamespaceInfo("ab" * 32)], [BlockInfo(b"k", 1, float("nan"))]),
    ],
)
def test_a_backend_that_lists_nonsense_is_named(listed: list[Any], scanned: list[Any]) -> None:
    """No command ends in a traceback or removes any block: the error names the backend, and the status is 1."""
    tier = hostile(HostileBackend, [BlockInfo(b"good", 300), *scanned], listed)
    for command in (["inspect", "--keys", "--json"], ["scrub"], ["gc", "--expire", "1s"]):
        done = run_here(*command, "--tier", tier)
        assert done.returncode == 1, done.stderr
        assert "[listed]" in done.stderr and "Correct the backend" in done.stderr


@pytest.mark.parametrize("outcomes", [None, [], ["ok"], [Outcome.OK] * 9])
def test_a_backend_with_wrong_outcomes_is_named(outcomes: Any) -> None:
    """A scrub reports the block as unreadable, removes no block, and ends without a traceback."""
    WrongOutcomes.outcomes = outcomes
    done = run_here("scrub", "--json", "--tier", hostile(WrongOutcomes, [BlockInfo(b"k", 300)]))
    assert (done.returncode, report_of(done)["set_aside"]) == (1, 0)
    (row,) = report_of(done)["unread"]
    assert "get_into" in row["what"] and "Correct the backend" in row["what"]


def test_blocks_that_can_not_be_read_here_and_there_end_no_scrub() -> None:
    """Only 16 in a row mean that the medium has failed."""
    tier = hostile(PatchyBackend, [BlockInfo(bytes([number]), 300) for number in range(50)])
    done = run_here("scrub", "--json", "--tier", tier)
    report = report_of(done)
    assert (done.returncode, len(report["unread"]), report["gone"], report["error"]) == (1, 25, 25, "")


def test_a_backend_that_fails_to_close_is_named() -> None:
    """The error names the method; the status is 1."""
    done = run_here("inspect", "--tier", hostile(UnclosableBackend, []))
    assert (done.returncode, "close raised ValueError" in done.stderr) == (1, True)


def test_a_claimed_length_takes_no_memory() -> None:
    """A block that claims exabytes is reported as unreadable, and the blocks beside it are verified."""
    tier = hostile(HostileBackend, [BlockInfo(b"k", 1 << 60)])
    with memory_rise() as rise:
        done = run_here("scrub", "--json", "--tier", tier)
    assert (done.returncode, len(report_of(done)["unread"])) == (1, 1)
    assert rise.bytes <= 32 << 20


class UnlistedBackend(ListedBackend):
    """A backend without a scan."""

    scan = SimpleBackend.scan


def test_a_backend_of_ones_own_can_be_looked_after() -> None:
    """Commands work on a third-party backend through its scan, in the given namespace."""
    path = f"{__name__}:ListedBackend"
    ListedBackend.records.clear()
    _fill({"backend": path}, _MODEL)
    tier = json.dumps({"backend": path})
    whole = ("--tier", tier, "--namespace", _MODEL.hex)
    (row,) = report_of(run_here("inspect", "--json", *whole))["rows"]
    assert (row["namespace"], row["blocks"]) == (_MODEL.hex, len(_KEYS))
    assert report_of(run_here("scrub", "--json", *whole))["blocks"] == len(_KEYS)
    name = _MODEL.digest + _KEYS[0]
    ListedBackend.records[name] = ListedBackend.records[name][:-1] + b"!"
    assert run_here("scrub", *whole).returncode == 3
    assert name not in ListedBackend.records
    for given in (("--tier", tier), ("--tier", tier, "--namespace", _MODEL.hex[:12])):
        done = run_here("inspect", *given)
        assert (done.returncode, "--namespace" in done.stderr) == (2, True)
    done = run_here("inspect", "--tier", json.dumps({"backend": f"{__name__}:UnlistedBackend"}), *whole[2:])
    assert (done.returncode, "no scan" in done.stderr) == (2, True)
