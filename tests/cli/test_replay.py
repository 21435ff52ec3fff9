from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from kvstore.cli.bench import replay as replay_command
from kvstore.cli.bench.engine import DryTier, Link, Pace, ReplayEngine, WatchedTier
from kvstore.cli.bench.room import PolicyRoom
from kvstore.cli.bench.simulation import ReplayCase, ReplaySettings, auto_capacities, replay
from kvstore.cli.bench.traces import Trace, TraceRequest, TraceShape, generate_trace
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.tier_argument import parse_tier
from kvstore.errors import ConfigError
from kvstore.eviction import POLICY_NAMES
from kvstore.primary import PrimaryTier
from kvstore.tenants import Tenant, Tenants
from kvstore.tiering import TieringManager
from kvstore.tiering.policy import OWN_PARAMETERS
from tests.cli.cli import report_of, run_program
from tests.cli.in_process import run_here
from tests.cli.lru_simulation import lru_hits

_BLOCK = ReplaySettings().bytes_per_token * 512
_DISK = '{"type": "file", "path": "/nowhere", "capacity": "1GiB"}'


def _trace(seed: int, requests: int = 600, **more: Any) -> Trace:
    return generate_trace(TraceShape(requests=requests, seed=seed, **more))


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_unlimited_policies_have_the_hits_of_the_trace(seed: int, policy: str) -> None:
    """Without eviction the policy does not matter, and the hits equal those of the trace itself."""
    trace = _trace(seed)
    row = replay(trace, ReplayCase(policy))
    assert (row["hit_blocks"], row["evicted_blocks"]) == (lru_hits(trace), 0)
    assert row["capacity_bytes"] is None


@pytest.mark.parametrize("blocks", [1, 10, 100, 500, 1000, 2000])
@pytest.mark.parametrize("seed", range(3))
def test_limited_lru_has_the_hits_of_the_simulation(seed: int, blocks: int) -> None:
    """The manager's LRU is exact, even for prompts larger than the tier; large tiers evict several blocks at once."""
    trace = _trace(seed)
    row = replay(trace, ReplayCase("lru", blocks * _BLOCK))
    step_blocks = ReplaySettings().step_tokens // trace.block_tokens
    assert row["hit_blocks"] == lru_hits(trace, blocks, step_blocks=step_blocks, piece=min(16, blocks // 128))
    assert row["evicted_blocks"] > 0 or blocks >= trace.distinct_blocks


@pytest.mark.parametrize("cpu_blocks", [300, 600, 2000])
def test_a_tier_without_a_limit_makes_up_for_a_small_primary_tier(cpu_blocks: int) -> None:
    """Blocks evicted by the primary tier are loaded from the tier below, and count as its hits."""
    trace = _trace(1)
    tier = parse_tier(_DISK).with_options(capacity="1PiB")
    row = replay(trace, ReplayCase(), ReplaySettings(tiers=[tier], cpu_bytes=cpu_blocks * _BLOCK))
    cpu, disk = row["tiers"]
    assert row["hit_blocks"] == lru_hits(trace) == cpu["hit_blocks"] + disk["hit_blocks"]
    assert row["hit_tokens"] == cpu["hit_tokens"] + disk["hit_tokens"]
    # A block evicted between its promotion and its request's load is loaded again.
    assert 0 <= disk["loaded_bytes"] - disk["hit_blocks"] * _BLOCK <= 20 * _BLOCK
    assert disk["stored_bytes"] == trace.distinct_blocks * _BLOCK
    assert (disk["evicted_blocks"], disk["not_stored_blocks"]) == (0, 0)


def test_the_capacity_of_a_case_is_that_of_the_last_tier() -> None:
    """Earlier tiers and the primary tier keep their configured capacities."""
    trace = _trace(2)
    fast = parse_tier(_DISK).with_options(label="fast", capacity=500 * _BLOCK)
    slow = parse_tier(_DISK).with_options(label="slow", capacity="1PiB")
    settings = ReplaySettings(tiers=[fast, slow], cpu_bytes=300 * _BLOCK)
    row = replay(trace, ReplayCase("adaptive", 2000 * _BLOCK), settings)
    assert [tier["name"] for tier in row["tiers"]] == ["cpu", "fast", "slow"]
    assert [tier["capacity_bytes"] for tier in row["tiers"]] == [300 * _BLOCK, 500 * _BLOCK, 2000 * _BLOCK]
    assert all(tier["hit_blocks"] > 0 for tier in row["tiers"])
    assert sum(tier["hit_blocks"] for tier in row["tiers"]) == row["hit_blocks"] <= lru_hits(trace)


def test_hit_rates_grow_with_the_capacity_up_to_all_that_is_shared() -> None:
    """The automatic capacities span the curve, and nothing is evicted at the largest."""
    trace = _trace(0)
    sizes = auto_capacities(trace, ReplaySettings())
    rates = [replay(trace, ReplayCase("lru", size))["hit_rate"] for size in sizes]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] == lru_hits(trace) / trace.blocks


@functools.cache
def _most_hits(prompts: tuple[tuple[int, ...], ...], cached: frozenset[int], slots: int) -> int:
    """Return the highest possible number of hits: try every set of blocks that may be kept after every request."""
    if not prompts:
        return 0
    hits = 0
    while hits < len(prompts[0]) and prompts[0][hits] in cached:
        hits += 1
    there = sorted(cached | set(prompts[0]))
    kept = min(slots, len(there))
    return hits + max(
        _most_hits(prompts[1:], frozenset(choice), slots) for choice in itertools.combinations(there, kept)
    )


@pytest.mark.parametrize("seed", range(12))
def test_optimum_equals_exhaustive_search(seed: int) -> None:
    """On small traces Belady's rule has as many hits as the best of all eviction sequences; no policy has more."""
    rng = random.Random(seed)
    chats = [[100 * chat] for chat in range(3)]
    prompts = []
    for number in range(7):
        chat = rng.choice(chats)
        chat += range(chat[0] + 10 * number + 1, chat[0] + 10 * number + 1 + rng.randrange(3))
        prompts.append(tuple(chat))
    trace = Trace(
        TraceRequest(timestamp=at, input_length=512 * len(blocks), hash_ids=blocks) for at, blocks in enumerate(prompts)
    )
    for slots in (1, 3, 5):
        best = replay(trace, ReplayCase("belady", slots * _BLOCK))
        assert best["hit_blocks"] == _most_hits(tuple(prompts), frozenset(), slots)
        assert best["hit_blocks"] >= max(
            replay(trace, ReplayCase(name, slots * _BLOCK))["hit_blocks"] for name in POLICY_NAMES
        )


def test_hints_of_a_trace_count() -> None:
    """Sessions with hints about their return have more hits than the same sessions without hints."""
    shape = TraceShape(600, block_tokens=128, documents=0, turns=8.0, tool_share=0.7)
    plain, hinted = generate_trace(shape), generate_trace(replace(shape, hints=True))
    assert [request.hash_ids for request in plain] == [request.hash_ids for request in hinted]
    case = ReplayCase("lru", plain.distinct_blocks // 10 * 128 * ReplaySettings().bytes_per_token)
    without, with_hints = (replay(trace, case)["hit_blocks"] for trace in (plain, hinted))
    assert with_hints > 1.1 * without


def test_policies_differ_where_space_is_short() -> None:
    """Under LRU, scans that are never repeated evict reused blocks; the other policies keep them."""
    popular = [TraceRequest(timestamp=0, input_length=512 * 8, hash_ids=tuple(range(8)))]
    requests = popular * 3
    for round_ in range(40):
        for start in range(1000 + round_ * 48, 1048 + round_ * 48, 16):
            requests += [TraceRequest(timestamp=0, input_length=512 * 16, hash_ids=tuple(range(start, start + 16)))]
        requests += popular
    trace = Trace(requests)
    hits = {policy: replay(trace, ReplayCase(policy, 20 * _BLOCK))["hit_blocks"] for policy in POLICY_NAMES}
    assert hits["lru"] == lru_hits(trace, 20)
    assert hits["arc"] > hits["lru"]


def test_tokens_and_seconds_follow_from_the_blocks() -> None:
    """The last block of a prompt counts with its actual tokens, and saved time is tokens divided by speed."""
    request = TraceRequest(timestamp=0, input_length=700, hash_ids=(1, 2))
    row = replay(Trace([request, request]), ReplayCase(), ReplaySettings(prefill_tokens_per_s=350))
    assert (row["hit_blocks"], row["hit_tokens"], row["tokens"]) == (2, 700, 1400)
    assert (row["prefill_s_saved"], row["prefill_s"]) == (2.0, 4.0)


def test_the_trace_has_its_own_time_and_speed_shortens_it() -> None:
    """In a dry replay lifetimes follow the timestamps divided by the speed."""
    requests = [TraceRequest(timestamp=at_s * 1000, input_length=512, hash_ids=(1,)) for at_s in (0, 100)]
    settings = ReplaySettings(offload={"ttl": "60s"})
    assert replay(Trace(requests), ReplayCase(), settings)["hit_blocks"] == 0
    faster = ReplaySettings(offload={"ttl": "60s"}, speed=2.0)
    assert replay(Trace(requests), ReplayCase(), faster)["hit_blocks"] == 1


def test_an_offload_policy_applies_to_all_requests() -> None:
    """With ``min_uses`` of 2, blocks used once are never written to the tier."""
    trace = _trace(0)
    settings = [
        ReplaySettings(tiers=[parse_tier(_DISK)], cpu_bytes=600 * _BLOCK, offload=offload)
        for offload in ({}, {"min_uses": 2})
    ]
    every, used = (replay(trace, ReplayCase("lru", 10**6 * _BLOCK), each)["tiers"][1] for each in settings)
    assert 0 < used["stored_bytes"] < every["stored_bytes"] * 0.7


def test_wrong_bytes_are_counted() -> None:
    """A tier that reports a load but did not write the block is detected."""
    trace = _trace(0, requests=100, documents=0, turns=5)
    primary = PrimaryTier(memoryview(bytearray(120 * 64)), 64)
    tier = WatchedTier(DryTier("liar", PolicyRoom("lru", None), block_bytes=64))
    pace = Pace(None, real=False)
    manager = TieringManager(primary, [tier], clock=pace.now_s)
    engine = ReplayEngine(trace, manager, primary, [tier], pace, step_blocks=16, concurrency=1, with_bytes=True)
    engine.run()
    assert engine.counts.hit_blocks["liar"] > 0
    assert engine.counts.wrong_blocks > 0
    assert manager.close()


@pytest.mark.parametrize("backend", ["file", "memory"])
def test_real_bytes_go_through_real_tiers_and_come_back_right(tmp_path: Path, backend: str) -> None:
    """Requests run concurrently; every loaded block is compared, and the replay leaves no files behind."""
    where = {} if backend == "memory" else {"path": str(tmp_path / "tier")}
    tier = parse_tier(json.dumps({"type": backend, "capacity": "32MiB", **where}))
    settings = ReplaySettings(tiers=[tier], cpu_bytes=6 << 20, dry=False, bytes_per_token=32, prefill_tokens_per_s=1)
    # On a busy machine a few requests may all end before their first block is on its medium.
    for requests in (120, 600, 3000):
        trace = _trace(0, requests=requests)
        row = replay(trace, ReplayCase(), settings)
        assert (row["requests"], row["wrong_blocks"], row["block_bytes"]) == (requests, 0, 16384)
        assert row["hit_blocks"] <= lru_hits(trace)
        if tier.paths:
            with Medium(tier) as holdings:
                assert [list(holdings.blocks(namespace)) for namespace in holdings.namespaces()] == [[]]
        if row["tiers"][1]["hit_blocks"] > 0:
            break
    assert row["tiers"][1]["hit_blocks"] > 0


@pytest.mark.program
@pytest.mark.parametrize("load", [0.2, 0.9, 1.3])
@pytest.mark.parametrize("link", [Link(10e9, 0.001), Link(1e9, 0.02), Link(0.3e9, 0.02)])
def test_the_gate_is_about_as_good_as_the_better_of_loading_and_computing(link: Link, load: float) -> None:
    """For an idle, a busy and an overloaded engine in simulated time, the gate is on average better than both."""
    disk = [parse_tier('{"type": "file", "path": "/nowhere", "capacity": "1TiB"}')]
    rows = []
    # The times of a single trace depend on single requests.
    for trace in (_trace(seed, 300) for seed in (1, 2, 3)):
        speed = load / (trace.tokens / 10_000 / (trace.requests[-1].timestamp / 1000))
        settings = ReplaySettings(tiers=disk, cpu_bytes=16 << 30, links=[link], speed=speed, concurrency=64)
        gate, loading, computing = (
            replay(trace, ReplayCase(), replace(settings, gate=gate, offload=offload))
            for gate, offload in ((True, {}), (False, {}), (False, {"load": False}))
        )
        assert computing["hit_blocks"] == 0 < gate["hit_blocks"]
        assert loading["gate"]["loaded"] == 0
        rows.append((gate, loading, computing))
    assert any(gate["gate"]["loaded"] for gate, _, _ in rows)
    for name in ("ttft_s_p50", "ttft_s_p95"):
        gated_s, loading_s, computing_s = (sum(row[name] for row in column) for column in zip(*rows, strict=True))
        assert gated_s <= 1.02 * min(loading_s, computing_s), (name, rows)


def test_links_take_time_and_queue() -> None:
    """A load takes the link's latency plus its transfer time, one load after another; computing takes time as well."""
    prompts = [(0, range(4)), (30, range(4, 8)), (40, range(10, 26)), (60, range(4)), (60, range(4, 8))]
    requests = [
        TraceRequest(timestamp=1000 * at_s, input_length=512 * len(blocks), hash_ids=tuple(blocks))
        for at_s, blocks in prompts
    ]
    disk = [parse_tier('{"type": "file", "path": "/nowhere", "capacity": "1TiB"}')]
    settings = ReplaySettings(
        tiers=disk, cpu_bytes=16 * _BLOCK, links=[Link(4 * _BLOCK, 0.5)], gate=False, prefill_tokens_per_s=2048, speed=1
    )
    row = replay(Trace(requests), ReplayCase(), settings)
    # Computed: 1 s for 4 blocks, 4 s for 16. Loaded: the two requests share the link.
    assert row["hit_blocks"] == 8
    assert row["ttft_s_p50"] == pytest.approx(1.5, abs=0.05)
    assert row["ttft_s_p99"] == pytest.approx(4.0, abs=0.05)
    assert row["wait_s_p99"] == pytest.approx(2.5, abs=0.05)


def test_a_tier_without_a_capacity_has_no_limit() -> None:
    """The capacity of S3 and Redis is that of the server."""
    trace = _trace(1, 50)
    for tier in ("s3://kv-cache/kv?region=eu-central-1", "redis://127.0.0.1"):
        row = replay(trace, ReplayCase(), ReplaySettings(tiers=[parse_tier(tier)], cpu_bytes=300 * _BLOCK))
        assert (row["hit_blocks"], row["capacity_bytes"]) == (lru_hits(trace), None)


def test_a_load_that_outlives_all_requests_ends_soon() -> None:
    """A gate's probe over a very slow link takes hours of simulated time, but hardly any real time."""
    trace = _trace(1, 100)
    disk = [parse_tier('{"type": "file", "path": "/nowhere", "capacity": "1TiB"}')]
    settings = ReplaySettings(tiers=disk, cpu_bytes=16 << 30, links=[Link(1e6, 10.0)])
    assert replay(trace, ReplayCase(), settings)["seconds"] < 60


def test_a_link_needs_its_tier() -> None:
    """Each tier needs one link, and only if time is simulated."""
    disk = [parse_tier(_DISK)]
    for more in ({"tiers": disk, "links": [Link(1.0)] * 2}, {"links": [Link(1.0)]}):
        with pytest.raises(ConfigError, match="once for each --tier"):
            ReplaySettings(**more)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with --dry"):
        ReplaySettings(tiers=disk, links=[Link(1.0)], dry=False)


def test_links_of_the_command() -> None:
    """The table shows the time to first token; invalid links are refused."""
    command = ("replay", "--requests", "50", "--dry", "--cpu", "4GiB", "--tier", _DISK)
    shown = run_here("bench", *command, "--link", "2GB/s,5ms", "--no-gate")
    assert "TTFT p50 s" in shown.stdout
    report = report_of(run_here("bench", *command, "--link", "2GB/s,5ms", "--json"))
    assert report["parameters"]["links"] == [{"bytes_per_s": 2e9, "latency_s": 0.005}]
    assert report["rows"][0]["ttft_s_p95"] >= report["rows"][0]["ttft_s_p50"] > 0
    for link in ("0", "fast", "2GB/s,soon"):
        refused = run_here("bench", *command, "--link", link)
        assert refused.returncode == 2 and "--link" in refused.stderr, link


def test_a_real_replay_waits_for_the_arrival_of_requests() -> None:
    """With a speed, requests start no earlier than their timestamps; without one they start immediately."""
    requests = [TraceRequest(timestamp=at_s * 1000, input_length=512, hash_ids=(1,)) for at_s in (0, 30)]
    settings = ReplaySettings(dry=False, bytes_per_token=8, cpu_bytes=1 << 20, speed=100.0)
    started = time.monotonic()
    replay(Trace(requests), ReplayCase(), settings)
    assert time.monotonic() - started >= 0.3
    assert Pace(None, real=True).wait_s(requests[1]) == 0.0


@pytest.mark.parametrize(
    ("case", "settings", "says"),
    [
        (ReplayCase("fifo"), ReplaySettings(), "Unknown eviction policy"),
        (ReplayCase("ages"), ReplaySettings(), "that of the disk tier"),
        (ReplayCase("lru", 100), ReplaySettings(), "less than one block"),
        (ReplayCase(), ReplaySettings(dry=False), "needs a size"),
        (ReplayCase("belady"), ReplaySettings(tiers=[parse_tier(_DISK)]), "CPU memory alone"),
        (ReplayCase("belady"), ReplaySettings(dry=False, cpu_bytes=_BLOCK), "CPU memory alone"),
        (ReplayCase(), ReplaySettings(tiers=[parse_tier(_DISK).with_options(capacity="80%")]), "share"),
    ],
)
def test_invalid_replay_arguments_are_refused(case: ReplayCase, settings: ReplaySettings, says: str) -> None:
    """An invalid policy, size or share is an error before the replay starts."""
    with pytest.raises(ConfigError, match=says):
        replay(_trace(0, requests=5), case, settings)


def test_the_command_compares_policies_and_capacities(tmp_path: Path) -> None:
    """One row per policy and capacity, with the hits of the simulation; a saved trace gives the same report."""
    saved = tmp_path / "made.jsonl"
    sizes = f"{100 * _BLOCK},{400 * _BLOCK}"
    shape = ("--requests", "300", "--seed", "5", "--save-trace", str(saved))
    many = ("--dry", "--policy", "lru,arc,Belady", "--capacity", sizes, "--json")
    made = run_here("bench", "replay", *shape, *many)
    assert (made.returncode, made.stderr) == (0, "")
    rows = report_of(made)["rows"]
    assert [(row["policy"], row["capacity_bytes"] // _BLOCK) for row in rows] == [
        (policy, blocks) for blocks in (100, 400) for policy in ("lru", "arc", "belady")
    ]
    trace = _trace(5, requests=300)
    assert [row["hit_blocks"] for row in rows if row["policy"] == "lru"] == [lru_hits(trace, n) for n in (100, 400)]
    again = report_of(run_here("bench", "replay", str(saved), *many))["rows"]
    assert [row["hit_blocks"] for row in again] == [row["hit_blocks"] for row in rows]


def test_the_table_fits_eighty_columns() -> None:
    """If piped, the table is plain text of at most 80 columns, and stderr is empty."""
    done = run_program("bench", "replay", "--requests", "200", "--dry", "--policy", "lru,arc", "--capacity", "auto")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80
    assert done.stdout.splitlines()[1].split()[:3] == ["policy", "capacity", "hits"]


@pytest.mark.program
def test_four_thousand_requests_are_replayed_whole() -> None:
    """A dry replay handles a trace of the size of a public one."""
    done = run_here("bench", "replay", "--dry", "--json")
    (row,) = report_of(done)["rows"]
    assert row["requests"] == 4000
    assert row["hit_blocks"] == lru_hits(_trace(0, requests=4000))


def test_all_cases_are_checked_before_the_first_is_replayed(tmp_path: Path) -> None:
    """A real tier without such a policy is refused at the start; a dry replay simulates any policy."""
    tier = json.dumps({"type": "file", "path": str(tmp_path / "tier"), "capacity": "16MiB"})
    more = ("bench", "replay", "--requests", "20", "--bytes-per-token", "8", "--cpu", "1MiB", "--policy", "ages,arc")
    done = run_here(*more, "--tier", tier)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'arc'" in done.stderr
    assert not list(tmp_path.iterdir())
    for text in (tier, "redis://127.0.0.1:1/0"):
        dry = run_here(*more, "--tier", text, "--capacity", "1MiB", "--dry", "--json")
        assert [row["policy"] for row in report_of(dry)["rows"]] == ["ages", "arc"]


@pytest.mark.parametrize(
    ("tier", "policy"),
    [
        ((), "adaptive"),
        (("--tier", _DISK), "ages"),
        (("--tier", _DISK.replace("file", "nvme")), "ages"),
        (("--tier", "redis://127.0.0.1"), "lru"),
    ],
)
def test_without_a_policy_a_replay_evicts_by_that_of_the_tier(tier: tuple[str, ...], policy: str) -> None:
    """CPU memory evicts by its default, the disk tier by ages, and dry tiers of other media by LRU."""
    command = ("bench", "replay", "--requests", "50", "--dry", "--cpu", "4GiB", *tier, "--capacity", "1GiB", "--json")
    own = report_of(run_here(*command))["rows"]
    assert [row["policy"] for row in own] == [policy]
    named = report_of(run_here(*command, "--policy", policy))["rows"]
    assert own[0]["hit_blocks"] == named[0]["hit_blocks"]


def test_a_target_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    """Without --reuse a non-empty directory or a server is refused, and not changed."""
    (tmp_path / "precious").write_text("data")
    tier = json.dumps({"type": "file", "path": str(tmp_path), "capacity": "1MiB"})
    for text in (tier, "redis://127.0.0.1:1/0"):
        done = run_here("bench", "replay", "--requests", "5", "--cpu", "64MiB", "--tier", text)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--reuse" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_directory_that_a_replay_made_is_gone_afterwards(tmp_path: Path) -> None:
    """With real bytes the command removes the directory that it created."""
    tier = json.dumps({"type": "file", "path": str(tmp_path / "tier"), "capacity": "16MiB"})
    small = ("--requests", "40", "--bytes-per-token", "8", "--cpu", "1MiB")
    done = run_here("bench", "replay", *small, "--tier", tier)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


def test_interrupted_replay_prints_its_finished_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C the finished cases are printed, the report is marked incomplete, and the status is 130."""
    real, calls = replay_command.replay, []

    def interrupted(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(replay_command, "replay", interrupted)
    with pytest.raises(replay_command.Exit) as ended:
        replay_command.replay_command(requests=20, policy="lru,arc", dry=True, json=True)
    assert ended.value.exit_code == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["complete"], len(report["rows"])) == (False, 1)


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_hit_rate_is_drawn_over_the_capacity(tmp_path: Path, suffix: str, start: bytes) -> None:
    """The plot shows the printed rows."""
    path = tmp_path / f"rates{suffix}"
    more = ("--dry", "--policy", "lru,arc", "--capacity", "auto", "--plot", str(path))
    done = run_here("bench", "replay", "--requests", "100", *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes().startswith(start)


def test_a_plot_compares_the_default_with_lru_and_the_optimum() -> None:
    """Without names of policies, a plot has three curves, or two where the optimum can't be simulated."""
    for tier, expected in (((), ["adaptive", "lru", "belady"]), (("-t", "file:///x?capacity=1GiB"), ["ages", "lru"])):
        with tempfile.TemporaryDirectory() as directory:
            more = ("--dry", "--capacity", "1GiB", "--plot", f"{directory}/rates.svg", "--json", *tier)
            report = report_of(run_here("bench", "replay", "--requests", "20", *more))
        assert [row["policy"] for row in report["rows"]] == expected


def test_without_matplotlib_nothing_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If plotting is impossible, the error comes before the replay."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    more = ("--dry", "--capacity", "auto", "--plot", str(tmp_path / "a.png"))
    done = run_here("bench", "replay", "--requests", "5", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert "vllm-kvstore[plot]" in done.stderr


def test_a_picture_that_can_not_be_drawn_is_refused(tmp_path: Path) -> None:
    """An unsupported file format, or a single capacity to plot over, is an error, and no file is created."""
    for more in (["--plot", str(tmp_path / "a.pdf"), "--capacity", "auto"], ["--plot", str(tmp_path / "a.png")]):
        done = run_here("bench", "replay", "--requests", "20", "--dry", *more)
        assert (done.returncode, done.stdout) == (2, "")
    assert not list(tmp_path.iterdir())


def _shared_by_two(seed: int) -> Trace:
    """Return a trace that merges a victim's trace with that of a neighbour with five times its traffic."""
    parts = [("victim", _trace(seed, 150)), *(("neighbour", _trace(seed + number, 150)) for number in range(1, 6))]
    return Trace(
        changed(request, hash_ids=tuple(block * 6 + number for block in request.hash_ids), kvstore={"tenant": name})
        for number, (name, trace) in enumerate(parts)
        for request in trace
    )


@pytest.mark.parametrize("tiers", [[], [parse_tier(_DISK)]])
def test_a_tenant_has_the_hits_that_its_share_gives_it(tiers: Any) -> None:
    """With tenants, as many hits beside a neighbour as alone in its share; without tenants, fewer."""
    trace = _shared_by_two(3)
    alone = Trace(request for request in trace if request.kvstore["tenant"] == "victim")
    case = ReplayCase("lru", 800 * _BLOCK)
    cpu = {"tiers": tiers, "cpu_bytes": 100 * _BLOCK if tiers else None}
    named = {"victim": Tenant(guaranteed=0.5), "neighbour": Tenant()}
    shared = replay(trace, case, ReplaySettings(tenants=Tenants(by="parameter", named=named), **cpu))["tenants"]
    one = replay(trace, case, ReplaySettings(**cpu))["tenants"]
    share = replay(alone, ReplayCase("lru", 400 * _BLOCK), ReplaySettings(**cpu))["hit_blocks"]
    blocks = {name: found["blocks"] for name, found in shared.items()}
    assert blocks == {"victim": alone.blocks, "neighbour": trace.blocks - alone.blocks}
    assert {name: found["blocks"] for name, found in one.items()} == blocks
    assert one["victim"]["hit_blocks"] < 0.8 * share
    assert shared["victim"]["hit_blocks"] >= 0.99 * share


@pytest.mark.parametrize("shared", [False, True])
def test_a_user_with_ten_times_the_requests_spoils_no_hits_of_another(shared: bool) -> None:
    """Beside ten users who set every field of the default ``allow``, on a shared prompt too, a user keeps its hits."""
    choose = random.Random(5)
    values = {"store": [False, 0.3, True], "tiers": [[], ["disk"]], "cpu": [False, True], "load": [False, ["disk"]]}
    values |= {"min_uses": [1, 1000], "explain": [False, True]}
    assert values.keys() == set(OWN_PARAMETERS)
    alone = Trace(_trace(7, 150))
    others = [
        changed(
            request,
            hash_ids=tuple(block if shared and block < 50 else block + 100_000 * number for block in request.hash_ids),
            kvstore={name: choose.choice(them) for name, them in values.items()},
        )
        for number in range(1, 11)
        for request in _trace(7 if shared else 7 + number, 150)
    ]
    # Memory for a fraction of the blocks, and a disk for all.
    settings = ReplaySettings(tiers=[parse_tier(_DISK)], cpu_bytes=400 * _BLOCK)
    named = [changed(request, kvstore={"tenant": "victim"}) for request in alone]
    solo = replay(Trace(named), ReplayCase("lru", 40_000 * _BLOCK), settings)["tenants"]["victim"]["hit_blocks"]
    beside = replay(Trace([*named, *others]), ReplayCase("lru", 40_000 * _BLOCK), settings)
    assert beside["tenants"]["victim"]["hit_blocks"] >= 0.95 * solo > 0


def test_equal_blocks_of_two_tenants_are_two(tmp_path: Path) -> None:
    """Equal blocks of two tenants are separate, even in a real tier, whose blocks are compared and left unchanged."""
    requests = [
        TraceRequest(timestamp=number, input_length=1024, hash_ids=(1, 2), kvstore={"tenant": name} if name else {})
        for number, name in enumerate(["a", "b", "a", "b", ""])
    ]
    tier = parse_tier(json.dumps({"type": "file", "path": str(tmp_path / "kv"), "capacity": "64MiB", "reserve": 0}))
    settings = ReplaySettings(
        tiers=[tier],
        cpu_bytes=1 << 20,
        dry=False,
        bytes_per_token=64,
        concurrency=1,
        tenants=Tenants(by="parameter", named={"a": Tenant()}),
    )
    row = replay(Trace(requests), ReplayCase(), settings)
    assert row["wrong_blocks"] == 0 and row["hit_blocks"] == 4
    assert row["tenants"] == {"a": {"blocks": 4, "hit_blocks": 2}, "others": {"blocks": 6, "hit_blocks": 2}}
    medium = Medium(tier)
    assert not [block for namespace in medium.namespaces() for block in medium.blocks(namespace)]
    medium.close()


def test_tenants_of_the_command(tmp_path: Path) -> None:
    """The table and the report show each tenant's hits; an error names the mistake."""
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2], "kvstore": {"tenant": "acme"}}
    trace.write_text("".join(json.dumps(line | {"timestamp": number}) + "\n" for number in range(4)))
    shown = run_here("bench", "replay", str(trace), "--dry", "--tenants", '{"named": {"acme": {"guaranteed": 0.5}}}')
    assert shown.returncode == 0 and "acme 75.0%" in shown.stdout
    report = run_here("bench", "replay", str(trace), "--dry", "--tenants", '{"named": {"acme": {}}}', "--json")
    assert report_of(report)["rows"][0]["tenants"] == {"acme": {"blocks": 8, "hit_blocks": 6}}
    for text, wrong in (('{"named": {"acme": {"guaranteed": 2}}}', "guaranteed is 2"), ("[]", "JSON object")):
        failed = run_here("bench", "replay", str(trace), "--dry", "--tenants", text)
        assert failed.returncode == 2 and wrong in failed.stderr and "--tenants" in failed.stderr
    both = run_here("bench", "replay", str(trace), "--dry", "--policy", "belady", "--tenants", "{}")
    assert both.returncode == 2 and "tenants" in both.stderr


def test_an_unknown_policy_names_the_optimum_too() -> None:
    """The error lists the optimum, which only a replay has, and suggests it for a misspelt name."""
    done = run_here("bench", "replay", "--dry", "--policy", "beladi")
    assert done.returncode == 2
    assert "'belady', the optimum, and 'ages', the disk tier's. Did you mean 'belady'?" in done.stderr
