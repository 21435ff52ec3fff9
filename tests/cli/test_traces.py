from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cli.bench.traces import (
    Trace,
    TraceRequest,
    TraceShape,
    generate_trace,
    read_trace,
    write_trace,
)
from kvstore.errors import ConfigError
from tests.cli.lru_simulation import lru_hits

_LINE = '{"timestamp": 3, "input_length": 700, "output_length": 9, "hash_ids": [4, 7], "more": "ignored"}'


def test_lines_in_the_format_of_mooncake_are_read(tmp_path: Path) -> None:
    """Requests have the four fields of the format; other keys and empty lines are ignored."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{_LINE}\n\n{_LINE.replace('[4, 7]', '[4, 8]')}\n")
    trace = read_trace(path)
    assert trace.requests[0] == TraceRequest(timestamp=3, input_length=700, output_length=9, hash_ids=(4, 7))
    assert (len(trace), trace.blocks, trace.distinct_blocks, trace.tokens) == (2, 4, 3, 1400)
    assert [trace.tokens_of(trace.requests[0], blocks) for blocks in (0, 1, 2)] == [0, 512, 700]
    assert len(read_trace(path, limit=1)) == 1


def test_requests_are_in_the_order_of_their_arrival() -> None:
    """An unsorted trace is sorted; requests with equal times keep their order."""
    times = [5, 1, 5, 0]
    requests = [TraceRequest(timestamp=at, input_length=9, hash_ids=(n,)) for n, at in enumerate(times)]
    assert [request.hash_ids for request in Trace(requests)] == [(3,), (1,), (0,), (2,)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no request"),
        (_LINE + "\n{", "Line 2"),
        (_LINE.replace("700", '"many"'), "input_length"),
        (_LINE.replace("700", "-1"), "input_length"),
        (_LINE.replace(', "hash_ids": [4, 7]', ""), "hash_ids"),
        (_LINE.replace("[4, 7]", "[4, 4]"), "comes twice"),
        (_LINE.replace("[4, 7]", "[4, 7, 9]"), "less than 512 tokens"),
        ("\x89kvstor\n", "Line 1"),
    ],
)
def test_invalid_traces_are_refused(tmp_path: Path, text: str, says: str) -> None:
    """The error names the line or the request, and the expected content."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(path)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A missing file is an error that names it."""
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        read_trace(tmp_path / "missing.jsonl")


def test_a_made_trace_is_written_and_read_back(tmp_path: Path) -> None:
    """Generated traces have the same format."""
    made = generate_trace(TraceShape(requests=50, seed=3))
    write_trace(tmp_path / "made.jsonl", made)
    assert read_trace(tmp_path / "made.jsonl").requests == made.requests


def test_the_same_shape_makes_the_same_trace() -> None:
    """A trace depends only on its shape and seed."""
    assert (
        generate_trace(TraceShape(requests=200, seed=1)).requests
        == generate_trace(TraceShape(requests=200, seed=1)).requests
    )
    assert (
        generate_trace(TraceShape(requests=200, seed=1)).requests
        != generate_trace(TraceShape(requests=200, seed=2)).requests
    )


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_a_made_trace_stand_for_their_prefix(seed: int) -> None:
    """A block's occurrences all have the same preceding blocks; otherwise equal ids would not mean equal blocks."""
    prefixes: dict[int, tuple[int, ...]] = {}
    trace = generate_trace(TraceShape(requests=500, seed=seed))
    assert len(trace) == 500
    for request in trace:
        assert len(request.hash_ids) == -(-request.input_length // 512)
        for index, block in enumerate(request.hash_ids):
            assert prefixes.setdefault(block, request.hash_ids[:index]) == request.hash_ids[:index]


def test_chats_have_turns_and_prefixes_are_shared() -> None:
    """Later turns contain all full blocks of earlier ones; without turns and popular starts little is shared."""
    chats = generate_trace(TraceShape(requests=400, turns=6, documents=0, think_s=5))
    alone = generate_trace(TraceShape(requests=400, turns=1, systems=400, documents=0, popularity=0))
    assert lru_hits(chats) / chats.blocks > 0.5
    assert lru_hits(alone) / alone.blocks < 0.4


def test_popularity_follows_zipf() -> None:
    """With a larger exponent requests concentrate on fewer documents, so more blocks are hit."""
    flat, steep = (
        generate_trace(TraceShape(requests=400, turns=1, document_share=1.0, popularity=exponent))
        for exponent in (0.0, 1.5)
    )
    assert lru_hits(steep) / steep.blocks > lru_hits(flat) / flat.blocks + 0.1


@pytest.mark.parametrize(
    "wrong",
    [{"requests": 0}, {"turns": 0.5}, {"chats_per_s": 0.0}, {"document_share": 1.5}, {"popularity": -1.0}],
)
def test_a_shape_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    """Each number of a shape has a range."""
    with pytest.raises(ConfigError, match="Expected"):
        TraceShape(**wrong)  # type: ignore[arg-type]
