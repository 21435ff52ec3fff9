"""Real engines whose tiers are managed by kvstore: the restart story, reset, and offload policies of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.tiering.policy import OWN_PARAMETERS, PARAMETERS
from tests.vllm.engines import BLOCK_TOKENS, Engine, Start, full_blocks, managed, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROW_BYTES = 32768
"""A block of the tiny model: 2 layers, key and value of 2 heads of 32 float32, 32 tokens."""
PROMPT_TOKENS = [650, 640, 333, 65, 1000]
PROMPTS = [prompt(i, tokens) for i, tokens in enumerate(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    """The expected answers: those without any offloading."""
    return [answer["tokens"] for answer in plain.ask(*PROMPTS)]


@pytest.fixture(scope="module")
def restarted(start: Start, tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]) -> Engine:
    """An engine on the directory of one that was killed, with events on."""
    directory = tmp_path_factory.mktemp("kv")
    first = start(offloading=managed(directory))
    answers = first.ask(*PROMPTS)
    assert [answer["tokens"] for answer in answers] == expected
    first.call("settle")
    first.kill()
    tiering = {"allow": PARAMETERS}
    return start(offloading=managed(directory, eviction_policy="arc", tiering=tiering), events=True)


def test_a_restarted_engine_answers_from_disk(restarted: Engine, expected: list[list[int]]) -> None:
    """After a SIGKILL the same prompts give the same tokens, and all full blocks come from disk."""
    answers = restarted.ask(*PROMPTS)
    assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in answers] == [full_blocks(tokens) for tokens in PROMPT_TOKENS]
    assert restarted.call("tier_errors") == 0


def test_a_reset_empties_the_primary_tier_only(restarted: Engine, expected: list[list[int]]) -> None:
    """After a reset all blocks come from disk again; none stays pinned, and no request state is left."""
    restarted.call("settle")
    restarted.call("reset")
    assert restarted.call("manager_stats")["primary"]["ready"] == 0
    answers = restarted.ask(*PROMPTS)
    assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in answers] == [full_blocks(tokens) for tokens in PROMPT_TOKENS]
    restarted.call("settle")
    stats = restarted.call("manager_stats")
    assert (stats["jobs"], stats["promoting"], stats["primary"]["pinned"], stats["primary"]["writing"]) == (0, 0, 0, 0)
    assert restarted.call("metrics")["vllm:kvstore_loaded_bytes{file}"] > 0


def test_an_answer_has_the_account_of_its_blocks(restarted: Engine) -> None:
    """A request with ``explain`` gets its blocks by tier and the cause for the others; one without it gets nothing."""
    restarted.call("settle")
    restarted.call("reset")
    longer = [*PROMPTS[0], *prompt(77, 200)]
    held, blocks = full_blocks(PROMPT_TOKENS[0]) // BLOCK_TOKENS, full_blocks(len(longer)) // BLOCK_TOKENS
    (answer,) = restarted.call("ask", [longer], 6, {"explain": True})
    tier = answer["kvstore_account"]["tiers"]["file"]
    assert 0 < tier.pop("seconds") < 60
    assert answer["kvstore_account"] == {
        "blocks": blocks,
        "computed": blocks - held,
        "tiers": {"file": {"blocks": held, "missed": "absent"}},
    }
    (short,) = restarted.call("ask", [prompt(78, BLOCK_TOKENS - 8)], 2, {"explain": True})
    assert short["kvstore_account"] == {"blocks": 0, "computed": 0, "tiers": {"file": {"blocks": 0}}}
    assert "kvstore_account" not in restarted.ask(PROMPTS[1])[0]


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        ({"store": False}, 0),
        ({"store": 0.5}, full_blocks(full_blocks(300) // 2)),
        ({"store": {"tokens": 100}}, 96),
        ({"store": "much"}, 0),
        ({"load": False}, full_blocks(300)),
        ({"forget": True}, 0),
        ({"forget": {"after": 100}}, 96),
        ({"demote": True, "retain": 5}, full_blocks(300)),
    ],
    ids=str,
)
def test_policies_of_requests(restarted: Engine, policy: dict[str, Any], stored: int) -> None:
    """A request's ``kv_transfer_params["kvstore"]`` decides the hits of a later one; a bad value means the default."""
    text = prompt(sum(map(ord, str(policy))), 300)
    (first,) = restarted.call("ask", [text], 6, policy)
    restarted.call("settle")
    restarted.call("reset")
    (without,) = restarted.call("ask", [text], 6, {"load": False, "store": False})
    restarted.call("reset")
    (again,) = restarted.ask(text)
    assert without["cached"] == 0 and again["cached"] == stored
    assert first["tokens"] == without["tokens"] == again["tokens"]
    assert restarted.call("tier_errors") == 0


def test_an_orchestrator_passes_hints_with_a_request(restarted: Engine) -> None:
    """VLLM's ``kv_hints`` reach the manager: forgotten blocks are gone, and the rest of the prompt is found."""
    text = prompt(777, 300)
    restarted.call("ask_hinted", text, {"forget": {"after": 160}})
    restarted.call("settle")
    restarted.call("reset")
    (again,) = restarted.ask(text)
    assert again["cached"] == 160


def test_vllm_limits_the_tokens_that_are_stored_and_loaded(restarted: Engine) -> None:
    """VLLM's ``max_offload_tokens`` and ``max_load_tokens`` hold for a prompt, whatever kvstore holds of it."""
    text = prompt(778, 300)

    def ask(**params: int) -> dict[str, Any]:
        (answer,) = restarted.call("ask", [text], 6, None, params)
        restarted.call("settle")
        restarted.call("reset")
        assert isinstance(answer, dict)
        return answer

    stores = [ask(max_offload_tokens=100), ask(max_offload_tokens=0)]
    loads = [ask(max_load_tokens=0), ask(max_load_tokens=170), ask()]
    assert [answer["cached"] for answer in stores + loads] == [0, 96, 0, 160, full_blocks(300)]
    assert len({tuple(answer["tokens"]) for answer in stores + loads}) == 1


def test_returning_sessions_get_their_own_blocks_from_disk(start: Start, plain: Engine, tmp_path: Path) -> None:
    """Long prompts that left the memory get no blocks of the short requests beside them (LMCache#4385)."""
    engine = start(offloading=managed(tmp_path, cpu_bytes_to_use=61 * ROW_BYTES))
    sessions = [prompt(seed, 900) for seed in range(800, 804)]
    expected = [answer["tokens"] for answer in plain.ask(*sessions)]
    for turn in range(3):
        shorts = [prompt(1000 + 100 * turn + number, 40 + 9 * number) for number in range(20)]
        right = [answer["tokens"] for answer in plain.ask(*shorts)]
        mixed = [text for number in range(4) for text in (sessions[number], *shorts[5 * number : 5 * number + 5])]
        answers = engine.ask(*mixed)
        assert [answers[6 * number]["tokens"] for number in range(4)] == expected
        assert [answer["tokens"] for place, answer in enumerate(answers) if place % 6] == right
        engine.call("settle")
        engine.call("forget_device")
    assert engine.call("manager_stats")["tiers"][0]["loaded"] > 2 * 60
    engine.close()


def test_lazy_blocks_stay_in_memory_while_there_is_room(restarted: Engine) -> None:
    """A lazy request's blocks stay in the primary tier while there is room; another's are written immediately."""

    def stored(seed: int, policy: dict[str, Any]) -> int:
        restarted.call("settle")
        before = restarted.call("manager_stats")["tiers"][0]["stored"]
        restarted.call("ask", [prompt(seed, 320)], 6, policy)
        restarted.call("settle")
        return int(restarted.call("manager_stats")["tiers"][0]["stored"] - before)

    assert stored(900, {}) == 10
    assert stored(901, {"lazy": True}) == 0
    assert restarted.call("manager_stats")["primary"]["dirty"] == 10
    metrics = restarted.call("metrics")
    assert metrics["vllm:kvstore_primary_slots{ready}"] > 0
    assert metrics["vllm:kvstore_manager_lookups{miss}"] > 0


def test_a_b_a_with_room_for_one(start: Start, tmp_path: Path) -> None:
    """Prompts A, B, A with room for one: A is computed again if B was offloaded, and found if B was not."""
    a, b = prompt(1, 640), prompt(2, 640)
    # One prompt has 20 blocks, and the last row holds the workers' counters.
    engine = start(offloading=managed(tmp_path, secondary_tiers=[], cpu_bytes_to_use=21 * ROW_BYTES))
    cached = {}
    for name, policy in (("everything", {}), ("selective", {"store": False})):
        engine.call("reset")
        engine.ask(a)
        engine.call("settle")
        engine.call("ask", [b], 6, policy)
        engine.call("settle")
        engine.call("forget_device")
        (answer,) = engine.ask(a)
        cached[name] = answer["cached"]
    assert cached["everything"] < 640 <= cached["selective"] + BLOCK_TOKENS, cached
    engine.close()


def test_a_user_with_ten_times_the_requests_spoils_no_hits_of_another(start: Start, tmp_path: Path) -> None:
    """By default no field of ten times as many requests, with the same system prompt, costs a user its hits."""
    engine = start(offloading=managed(tmp_path, cpu_bytes_to_use=61 * ROW_BYTES))
    system = prompt(1, 320)
    mine = [system + prompt(number, 320) for number in (2, 3, 4)]
    own = [{"store": False}, {"store": 0.1}, {"tiers": []}, {"cpu": False}, {"load": False}, {"min_uses": 1000}]
    own.append({"explain": True})
    others: list[dict[str, Any]] = [{"retain": 100}, {"demote": True}, {"forget": True, "ttl": "1ms"}]
    assert set(OWN_PARAMETERS) <= {name for policy in own for name in policy}
    first = engine.ask(*mine)
    engine.call("settle")  # The small primary tier evicts blocks that still wait for the disk.
    for turn in range(3):
        for number, policy in enumerate((*own, *others)):
            theirs = [system + prompt(100 * turn + 10 * number + place, 320) for place in (11, 12, 13)]
            engine.call("ask", theirs, 1, policy, {"remote_decoder": {}})
        engine.call("settle")
        engine.call("forget_device")
        again = engine.ask(*mine)
        assert [answer["cached"] for answer in again] == [full_blocks(640)] * 3
        assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in first]
    engine.close()


def beside_fs(directory: Path, *tiers: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with vLLM's own ``fs`` tier after others, and without ``manager``."""
    fs = {"type": "fs", "root_dir": str(directory), "reset": "keep"}
    found = managed(directory, secondary_tiers=[*tiers, fs])
    del found["manager"]
    return found


def test_vllms_fs_tier_runs_under_our_manager(start: Start, tmp_path: Path, expected: list[list[int]]) -> None:
    """A restarted engine with ``fs`` beside our tier keeps our manager and answers from the files of ``fs``."""
    first = start(offloading=beside_fs(tmp_path, {"type": "memory"}))
    assert [answer["tokens"] for answer in first.ask(*PROMPTS)] == expected
    first.call("settle")
    assert "kvstore manages" in first.text()
    first.kill()
    second = start(offloading=beside_fs(tmp_path, {"type": "memory"}), events=True)
    answers = second.ask(*PROMPTS)
    assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in answers] == [full_blocks(tokens) for tokens in PROMPT_TOKENS]
    second.call("settle")
    tiers = {tier["name"]: tier for tier in second.call("manager_stats")["tiers"]}
    assert tiers["memory"]["loaded"] == 0
    assert tiers["fs"]["loaded"] == sum(full_blocks(tokens) // BLOCK_TOKENS for tokens in PROMPT_TOKENS)
    second.call("reset")
    assert [answer["tokens"] for answer in second.ask(*PROMPTS)] == expected
    assert second.call("tier_errors") == 0 and sum(tier["errors"] for tier in tiers.values()) == 0
    second.close()
