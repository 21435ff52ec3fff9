"""Offload policies in requests and configurations."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.tiering import OffloadPolicy, TieringConfig
from kvstore.tiering.policy import HAND_OVER, PARAMETERS, PolicyParser

TIERS = ["disk", "far"]
NAMES = st.text() | st.sampled_from(["store", "tiers", "cpu", "load", "min_uses", "ttl", "retain", "lazy", "tokens"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"store": True}, {}),
        ({"store": False}, {"store": False}),
        ({"store": 0.25}, {"store_fraction": 0.25}),
        ({"store": 1}, {"store_fraction": 1.0}),
        ({"store": 0}, {"store_fraction": 0.0}),
        ({"store": {"tokens": 512}}, {"store_tokens": 512}),
        ({"tiers": ["far"]}, {"tiers": ("far",)}),
        ({"tiers": []}, {"tiers": ()}),
        ({"tiers": None}, {}),
        ({"cpu": False}, {"cpu": False}),
        ({"load": False}, {"load": False}),
        ({"load": ["disk"]}, {"load_tiers": ("disk",)}),
        ({"min_uses": 3}, {"min_uses": 3}),
        ({"min_uses": "auto"}, {"min_uses": 0}),
        ({"ttl": 90}, {"ttl_s": 90.0}),
        ({"ttl": "10m"}, {"ttl_s": 600.0}),
        ({"explain": True}, {"explain": True}),
        ({"lazy": True}, {"lazy": True}),
    ],
)
def test_every_value_is_understood(params: object, expected: dict[str, object]) -> None:
    """Each documented form gives the documented policy."""
    parser = PolicyParser(TIERS, {}, PARAMETERS)
    assert parser.parse(params) == OffloadPolicy(**expected)  # type: ignore[arg-type]
    assert not parser.mistakes


NOTHING_STORED = {"store": False}
NO_TIER = {"tiers": ()}


@pytest.mark.parametrize(
    ("params", "hint", "expected"),
    [
        ({"store": 1.5}, "fraction from 0 to 1", NOTHING_STORED),
        ({"store": -0.1}, "fraction from 0 to 1", NOTHING_STORED),
        ({"store": float("nan")}, "fraction from 0 to 1", NOTHING_STORED),
        ({"store": "no"}, "fraction from 0 to 1", NOTHING_STORED),
        ({"store": {"tokens": -1}}, "whole number", NOTHING_STORED),
        ({"store": {"tokens": True}}, "whole number", NOTHING_STORED),
        ({"store": {"blocks": 3}}, "{'tokens': n}", NOTHING_STORED),
        ({"tiers": "disk"}, "list of tier names", NO_TIER),
        ({"tiers": ["dsik"]}, "Did you mean 'disk'?", NO_TIER),
        ({"tiers": ["disk", "nosuch"]}, "no tier 'nosuch'", NO_TIER),
        ({"tiers": [7]}, "Known: disk, far", NO_TIER),
        ({"load": "disk"}, "list of tier names", {"load": False}),
        ({"load": ["nosuch"]}, "no tier 'nosuch'", {"load": False}),
        ({"cpu": 1}, "true or false", {"cpu": False}),
        ({"min_uses": 0}, "1 or more", NO_TIER),
        ({"min_uses": 2.5}, "whole number", NO_TIER),
        ({"ttl": 0}, "above 0", NOTHING_STORED),
        ({"ttl": "soon"}, "soon", NOTHING_STORED),
        ({"ttl": [1]}, "duration", NOTHING_STORED),
        ({"lazy": 1}, "true or false", {}),
        ({"lasy": True}, "Did you mean 'lazy'?", NO_TIER),
        ({"tires": ["disk"]}, "Did you mean 'tiers'?", NO_TIER),
        ({"tires": ["disk"], "tiers": ["far"]}, "Did you mean 'tiers'?", NO_TIER),
        ({"stor": False}, "Did you mean 'store'?", NOTHING_STORED | NO_TIER),
        ({"laod": False}, "Did you mean 'load'?", {"load": False} | NO_TIER),
        ({7: True}, "Known: store", NO_TIER),
        (["store"], "JSON object", {"store": False, "load": False}),
        ("store", "JSON object", {"store": False, "load": False}),
        (False, "JSON object", {"store": False, "load": False}),
        ([], "JSON object", {"store": False, "load": False}),
    ],
)
def test_invalid_policy_value_is_one_warning_and_restricts(
    params: object, hint: str, expected: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid value causes one clear warning, does not fail the request, and stores in no excluded tier."""
    parser = PolicyParser(TIERS, {"min_uses": 2}, PARAMETERS)
    with caplog.at_level(logging.WARNING, "kvstore.tiering"):
        policies = [parser.parse(params) for _ in range(3)]
    assert policies == [replace(parser.default, **expected)] * 3  # type: ignore[arg-type]
    assert len(caplog.messages) == 1 and hint in caplog.messages[0], caplog.messages
    assert parser.mistakes == 3


@pytest.mark.parametrize("order", [1, -1])
def test_a_bad_value_spoils_no_other(order: int) -> None:
    """Other values apply, wherever the bad one is, and none of them relaxes its restriction."""
    given = dict([("tiers", "disk"), ("store", 0.5), ("lazy", True), ("load", ["far"])][::order])
    policy = PolicyParser(TIERS, {}, PARAMETERS).parse(given)
    assert policy == OffloadPolicy(store_fraction=0.5, lazy=True, load_tiers=("far",), tiers=())


def test_only_values_allowed_by_the_operator_apply(caplog: pytest.LogCaptureFixture) -> None:
    """A value that is not allowed is ignored and counted, with one warning; an unknown one still restricts."""
    parser = PolicyParser(TIERS, {"tiers": ["disk"]}, ["store", "ttl"])
    with caplog.at_level(logging.WARNING, "kvstore.tiering"):
        for _ in range(2):
            policy = parser.parse({"store": 0.5, "retain": 9, "tiers": ["far"], "load": "nonsense"})
    assert policy == OffloadPolicy(store_fraction=0.5, tiers=("disk",))
    assert (parser.refused, parser.mistakes, len(caplog.messages)) == (6, 0, 3)
    assert parser.parse({"tires": ["far"]}).tiers == ()
    assert PolicyParser(TIERS, {}, []).parse({"store": False, "retain": 9}) == OffloadPolicy()


def test_by_default_a_request_sets_only_its_own_stores_and_loads() -> None:
    """Without ``allow``, no parameter pins, retains, demotes, expires or removes a block that others share."""
    own = {"store": 0.5, "tiers": ["far"], "cpu": False, "load": ["disk"], "min_uses": 3, "explain": True}
    others = {"retain": 9, "demote": True, "forget": True, "tenant": "a"}
    others |= {"lazy": True, "ttl": 1}
    parser = PolicyParser(TIERS, {}, TieringConfig().allow)
    expected = PolicyParser(TIERS, own).default
    assert parser.parse(own | others) == expected != OffloadPolicy()
    assert {*own, *others, HAND_OVER} == set(PARAMETERS) and parser.refused == len(others)


@pytest.mark.parametrize("name", ["forgett", "Forget", "cache_forget", "forget "])
def test_a_misspelt_name_removes_nothing_without_permission(name: str) -> None:
    """It counts as a restriction of the request's own stores, and as that of its nearest name only if allowed."""
    assert PolicyParser(TIERS, {}).parse({name: True}) == OffloadPolicy(tiers=())
    assert PolicyParser(TIERS, {}, ["forget"]).parse({name: True}).forget_tokens == 0


def test_a_request_with_very_many_parameters_stores_and_loads_nothing() -> None:
    """Looking for the nearest known name of each would take seconds on the scheduler's thread."""
    many = {f"min_uses{number}": 2 for number in range(33)}
    assert PolicyParser(TIERS, {}).parse(many) == OffloadPolicy(store=False, load=False)


def test_misspelt_name_in_allow_is_an_error() -> None:
    """A misspelt name in ``allow`` is an error at startup."""
    with pytest.raises(ConfigError, match=r"allow contains the unknown parameter 'stroe'.*Did you mean 'store'"):
        PolicyParser(TIERS, {}, ["stroe"])


def test_requests_override_defaults() -> None:
    """A request's values override the configured ones, value by value."""
    parser = PolicyParser(TIERS, {"store": 0.5, "lazy": True})
    assert parser.default == OffloadPolicy(store_fraction=0.5, lazy=True)
    assert parser.parse({"store": True}) == OffloadPolicy(lazy=True)


def test_bad_defaults_are_refused() -> None:
    """An invalid configuration is an error at startup that suggests a correction."""
    with pytest.raises(ConfigError, match="Did you mean 'far'"):
        PolicyParser(TIERS, {"tiers": ["fra"]})


def test_mistakes_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """New mistakes of a client are counted each time, and logged a bounded number of times."""
    parser = PolicyParser(TIERS, {}, PARAMETERS)
    with caplog.at_level(logging.WARNING, "kvstore.tiering"):
        for number in range(1000):
            parser.parse({"store": {"tokens": -1 - number}})
    assert parser.mistakes == 1000 and len(caplog.messages) <= 256


@given(JSON)
def test_nothing_that_a_client_sends_fails(params: object) -> None:
    """Any JSON from a client gives a policy."""
    assert isinstance(PolicyParser(TIERS, {}, PARAMETERS).parse(params), OffloadPolicy)


@pytest.mark.parametrize(
    ("fraction", "tokens", "expected"), [(0.5, 100, 50), (0.29, 100, 29), (0.5, 33, 16), (0.0, 9, 0), (1.0, 9, 9)]
)
def test_fractions_are_of_the_prompt(fraction: float, tokens: int, expected: int) -> None:
    """A fraction gives whole tokens from the start, without binary rounding errors."""
    assert OffloadPolicy(store_fraction=fraction).tokens_max(tokens) == expected


def test_request_without_store_stores_no_tokens_under_any_limit() -> None:
    """A request that may not store stores no tokens, even if the default allows a number of tokens."""
    parser = PolicyParser(TIERS, {"store": {"tokens": 512}})
    policy = parser.parse({"store": False})
    assert not policy.stores_all and policy.tokens_max(1000) == 0
    assert OffloadPolicy(store=False, store_tokens=512).tokens_max(1000) == 0
