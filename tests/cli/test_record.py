"""``kvstore-bench record``: the trace of a running engine replays like the engine's requests."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvstore.cli.bench.record import Recorder
from kvstore.cli.bench.traces import read_trace
from kvstore.errors import ConfigError
from kvstore.primary import PrimaryTier
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiering.recording import RecordedRequest, RequestFeed
from kvstore.types import RequestContext
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.project.tree import ROOT

SLOT = 4096
WAIT_S = 60
BLOCK_TOKENS = 16


def keys(*numbers: int) -> list[bytes]:
    """Return keys in vLLM's format."""
    return [b"%032d\0\0\0\0" % number for number in numbers]


@contextmanager
def engine(path: Path) -> Iterator[TieringManager]:
    """Run a manager that sends its requests to a socket."""
    config = TieringConfig(trace_socket=str(path), tokens_per_block=BLOCK_TOKENS)
    manager = TieringManager(PrimaryTier(memoryview(bytearray(4 * SLOT)), SLOT), [], config)
    try:
        yield manager
    finally:
        manager.close()


def received(recorder: Recorder, count: int) -> list[Sequence[int]]:
    """Return the blocks of ``count`` requests."""
    found: list[Sequence[int]] = []
    deadline = time.monotonic() + WAIT_S
    for request in recorder.requests(lambda: len(found) == count or time.monotonic() > deadline):
        found.append(request.hash_ids)
    return found


def _after(seconds: float) -> Callable[[], bool]:
    """Return a predicate that is true once this time has passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def test_a_recording_replays_as_the_requests_were(tmp_path: Path) -> None:
    """Equal blocks have equal numbers in the trace, in prefix order; it has no keys, and its hits are those of LRU."""
    path, out = tmp_path / "trace.sock", tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "kvstore", "bench", "record", str(path), "--out", str(out), "--requests", "3"]
    requests = [keys(1, 2, 3), keys(1, 2, 4, 5), keys(6)]
    with engine(path) as manager:
        manager.on_new_request(RequestContext("before"), keys(9))
        recorder = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
        )
        assert recorder.stderr is not None
        assert "Recording" in recorder.stderr.readline()
        for number, of_request in enumerate(requests):
            manager.on_new_request(RequestContext(str(number)), of_request, prompt_tokens=70)
        _, errors = recorder.communicate(timeout=WAIT_S)
    assert recorder.returncode == 0, errors
    assert f"3 requests. Replay them: kvstore-bench replay {out} --block-tokens 16" in errors
    assert not path.exists()
    trace = read_trace(out, block_tokens=BLOCK_TOKENS)
    first, second, third = (list(request.hash_ids) for request in trace)
    assert [len(first), len(second), len(third)] == [3, 4, 1]
    assert first[:2] == second[:2]
    assert len({*first, *second, *third}) == 6
    assert {request.input_length for request in trace} == {70}
    assert (
        trace.requests[0].timestamp == 0 <= trace.requests[1].timestamp <= trace.requests[2].timestamp < 1000 * WAIT_S
    )
    done = run_here("bench", "replay", str(out), "--block-tokens", "16", "--dry", "--capacity", "1GiB", "--json")
    (row,) = report_of(done)["rows"]
    assert row["hit_rate"] == pytest.approx(2 / 8)


def test_two_recordings_have_nothing_in_common(tmp_path: Path) -> None:
    """Numbers are salted: a block has different numbers in two recordings, and they are not a hash of the key."""
    found = []
    for _ in range(2):
        with engine(tmp_path / "s") as manager, Recorder(tmp_path / "s") as recorder:
            manager.on_new_request(RequestContext("r"), keys(1))
            found.append(received(recorder, 1)[0][0])
    assert found[0] != found[1]


def test_the_longest_group_is_recorded(tmp_path: Path) -> None:
    """With several layer groups, the one with the most blocks is recorded, with its own block length."""
    ends = [1024, 2048, 960, 992, 1024, 1056, 2048]
    with engine(tmp_path / "s") as manager, Recorder(tmp_path / "s") as recorder:
        manager.on_new_request(RequestContext("r"), keys(*range(7)), ends=ends)
        assert len(received(recorder, 1)[0]) == 5
        assert recorder.block_tokens == 32


def test_losses_are_counted(tmp_path: Path) -> None:
    """A gap in an engine's sequence numbers is a loss; malformed requests and other block lengths are refused."""
    good = RecordedRequest(7, 0, 1.0, 16, 32, [1, 2])
    sent = [
        good,
        msgspec.structs.replace(good, number=5),
        msgspec.structs.replace(good, number=6, block_tokens=32),
        msgspec.structs.replace(good, number=7, blocks=[1, 2, 3]),
        msgspec.structs.replace(good, feed=8, number=40),
    ]
    with Recorder(tmp_path / "s") as recorder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(str(tmp_path / "s"))
        sender.send(b"no request")
        for request in sent:
            sender.send(msgspec.msgpack.encode(request))
        assert len(received(recorder, 3)) == 3
        assert (recorder.lost, recorder.refused) == (4, 3)


@pytest.mark.parametrize(
    "fault", [{"block_tokens": 0}, {"block_tokens": -1}, {"blocks": [-1]}, {"blocks": []}], ids=str
)
def test_an_impossible_request_costs_only_itself(tmp_path: Path, fault: dict[str, object]) -> None:
    """Impossible numbers in the first request are refused, and the block length of the next request counts."""
    good = RecordedRequest(7, 0, 1.0, 16, 32, [1, 2])
    with Recorder(tmp_path / "s") as recorder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(str(tmp_path / "s"))
        for request in (msgspec.structs.replace(good, **({"block_tokens": 99} | fault)), good):
            sender.send(msgspec.msgpack.encode(request))
        assert len(received(recorder, 1)) == 1
        assert (recorder.refused, recorder.block_tokens) == (1, 16)


def test_an_engine_never_waits_for_its_recorder(tmp_path: Path) -> None:
    """Requests that exceed a stalled recorder's buffer are dropped immediately, and reported as lost afterwards."""
    with Recorder(tmp_path / "s") as recorder:
        feed = RequestFeed(str(tmp_path / "s"))
        ends = dict.fromkeys(keys(1), 16)
        for _ in range(5000):
            feed.send(ends, 16)
        had_room = len(received(recorder, 1)) + sum(1 for _ in recorder.requests(_after(1.0)))
        assert 0 < had_room < 5000
        feed.send(ends, 16)
        received(recorder, 1)
        assert recorder.lost == 5000 - had_room


def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    """Other users may not send; a second recorder is refused, a dead one is replaced, a file is left alone."""
    path = tmp_path / "s"
    with Recorder(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="A recorder is running"), Recorder(path):
            pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(path))
    with Recorder(path):
        pass
    path.write_text("kept")
    with pytest.raises(ConfigError, match="can't be made"), Recorder(path):
        pass
    assert path.read_text() == "kept"
    with pytest.raises(ConfigError, match="107 bytes"):
        TieringConfig(trace_socket="/" + "x" * 107)


def test_without_a_request_the_command_fails(tmp_path: Path) -> None:
    """The error for an empty recording suggests checks, and the status is 1."""
    done = run_here("bench", "record", str(tmp_path / "s"), "--out", str(tmp_path / "t"), "--duration", "1ms")
    assert (done.returncode, "No request came" in done.stderr) == (1, True)
