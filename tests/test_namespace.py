"""Namespaces: other bytes, other digest; the same fields, the same digest, permanently."""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.namespace import FORMAT_VERSION, Namespace
from tests.codec.records import Record

FIELDS: dict[str, Any] = {
    "model": "org/model-7b",
    "revision": "5f2c",
    "weights": {"config.json": "ab12", "index": None},
    "text_config": {
        "hidden_size": 4096,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "dtype": "bfloat16",
    "kv_dtype": "auto:bfloat16",
    "block_tokens": 16,
    "chunk_blocks": 1,
    "layers": ["model.layers.0", "model.layers.1"],
    "groups": [{"kind": "full", "layers": [0, 1]}],
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "layout": "per-layer",
    "hash": {"algorithm": "sha256", "seed": "0"},
    "engine": "vllm 0.32",
    "user": "",
}


def changed(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    """Return the change of one field."""

    def change(fields: Any) -> None:
        for step in path[:-1]:
            fields = fields[step]
        fields[path[-1]] = to

    change.__name__ = f"{'.'.join(map(str, path))}={to!r}"
    return change


def removed(*path: str | int) -> Callable[[dict[str, Any]], None]:
    """Return the removal of one field."""

    def change(fields: Any) -> None:
        for step in path[:-1]:
            fields = fields[step]
        del fields[path[-1]]

    change.__name__ = f"no {'.'.join(map(str, path))}"
    return change


MUTATIONS = [
    changed("model", to="org/model-7B"),
    changed("model", to="org/model-7b "),
    changed("revision", to="5f2d"),
    changed("revision", to=None),
    removed("revision"),
    changed("weights", "config.json", to="ab13"),
    changed("weights", "index", to=""),
    changed("text_config", "hidden_size", to=4097),
    changed("text_config", "hidden_size", to=4096.0),
    changed("text_config", "hidden_size", to="4096"),
    changed("text_config", "num_key_value_heads", to=4),
    changed("text_config", "rms_norm_eps", to=1e-6),
    changed("text_config", "rms_norm_eps", to=math.nextafter(1e-5, 1)),
    changed("text_config", "rope_scaling", "type", to="linear"),
    changed("text_config", "rope_scaling", "factor", to=8.0),
    changed("text_config", "rope_scaling", "factor", to=4),
    changed("text_config", "rope_scaling", to=None),
    changed("text_config", "rope_theta", to=500000.0),
    changed("text_config", "sliding_window", to=4096),
    changed("text_config", "sliding_window", to=False),
    changed("text_config", "tie_word_embeddings", to=True),
    changed("text_config", "tie_word_embeddings", to=0),
    removed("text_config", "sliding_window"),
    changed("text_config", "a_field_of_next_year", to=None),
    changed("dtype", to="float16"),
    changed("kv_dtype", to="fp8_e4m3"),
    changed("kv_dtype", to="auto:float16"),
    changed("block_tokens", to=32),
    changed("chunk_blocks", to=2),
    changed("layers", to=["model.layers.1", "model.layers.0"]),
    changed("layers", to=["model.layers.0"]),
    changed("layers", 1, to="model.layers.2"),
    changed("groups", 0, "kind", to="sliding"),
    changed("groups", 0, "layers", to=[[0, 1]]),
    changed("tensor_parallel", to=2),
    changed("tensor_parallel", to=True),
    changed("pipeline_parallel", to=2),
    changed("layout", to="cross-layer"),
    changed("hash", "algorithm", to="xxhash"),
    changed("hash", "seed", to="1"),
    changed("engine", to="vllm 0.33"),
    changed("user", to="tenant-a"),
    changed("an unknown field", to=None),
    removed("layers"),
]

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_one_field_makes_another_namespace(mutation: Callable[[dict[str, Any]], None]) -> None:
    """A change of one field changes the digest, and a record of the one is a miss in the other."""
    fields = copy.deepcopy(FIELDS)
    mutation(fields)
    ours, theirs = Namespace(FIELDS), Namespace(fields)
    assert ours.digest != theirs.digest
    assert ours != theirs
    assert Record.make(256, b"payload", namespace=theirs).fault() == "ok"
    record = Record.make(256, b"payload", namespace=theirs)
    record.codec = Record.make(256, b"", namespace=ours).codec
    assert record.fault() == "namespace"


def test_all_mutations_differ_from_each_other() -> None:
    """At least 30 single-field changes give that many digests."""
    digests = {Namespace(FIELDS).digest}
    for mutation in MUTATIONS:
        fields = copy.deepcopy(FIELDS)
        mutation(fields)
        digests.add(Namespace(fields).digest)
    assert len(MUTATIONS) >= 30
    assert len(digests) == len(MUTATIONS) + 1


def test_digest_equals_its_documentation() -> None:
    """The digest is SHA-256 over canonical JSON, written out here by hand."""
    text = '{"fields":{"a":[1,1.0,true,null,"é\\"\\n"],"b":{"x":1e+16,"y":-0.5}},"format":1}'
    namespace = Namespace({"b": {"y": -0.5, "x": 1e16}, "a": [1, 1.0, True, None, 'é"\n']})
    assert FORMAT_VERSION == 1
    assert namespace.digest == hashlib.sha256(text.encode()).digest()
    assert namespace.hex == namespace.digest.hex()
    assert len(namespace.hex) == 64


def test_lookalikes_differ() -> None:
    """Values that are equal in Python, or print alike, are different fields."""
    values: list[Any] = [
        1,
        1.0,
        True,
        "1",
        [1],
        {"1": 1},
        0,
        0.0,
        -0.0,
        False,
        None,
        "",
        [],
        {},
        "None",
        "null",
        "true",
    ]
    values += ["é", "e\u0301", "a", "A", " a", 2**64, float(2**64), 10**100]
    assert len({Namespace({"x": value}).digest for value in values}) == len(values)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=6), PLAIN, max_size=5))
def test_order_and_copies_do_not_count(fields: dict[str, Any]) -> None:
    """The digest depends on the fields, not on their order, and the document restores it."""
    namespace = Namespace(fields)
    again = Namespace(dict(reversed(copy.deepcopy(fields).items())))
    assert namespace == again
    assert hash(namespace) == hash(again)
    document = json.loads(json.dumps(namespace.document()))
    assert Namespace(document["fields"]).hex == document["digest"] == namespace.hex
    assert document["format"] == FORMAT_VERSION


@settings(deadline=None)
@given(PLAIN, PLAIN)
def test_different_values_have_different_digests(first: Any, second: Any) -> None:
    """Two values have the same digest only if their JSON is the same."""
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (Namespace({"x": first}) == Namespace({"x": second})) is same


class Colour(enum.StrEnum):
    """A subclass of str."""

    RED = "red"


class Number(enum.IntEnum):
    """A subclass of int."""

    ONE = 1


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        b"bytes",
        (1, 2),
        {1, 2},
        object(),
        Colour.RED,
        Number.ONE,
        np.int64(1),
        np.float64(1),
        {1: 2},
        {None: 1},
        {True: 1},
        {Colour.RED: 1},
        {"a": {"b": [1, math.nan]}},
        1j,
        "\ud800",
        {"\ud800": 1},
        10**5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_without_stable_json_are_refused(value: object) -> None:
    """Only plain JSON values are fields; NaN, subclasses, tuples and bytes are not."""
    with pytest.raises(ConfigError, match=r"[Nn]amespace"):
        Namespace({"x": value})


def test_the_deepest_value_and_a_mapping_of_another_type() -> None:
    """32 levels are accepted and 33 are not; only the fields as a whole may be any mapping type."""

    def nested(depth: int) -> dict[str, Any]:
        return {"field": 1 if depth == 1 else nested(depth - 1)}

    assert Namespace(nested(32)) == Namespace(types.MappingProxyType(nested(32)))
    with pytest.raises(ConfigError, match="nested deeper"):
        Namespace(nested(33))
    with pytest.raises(ConfigError, match="mappingproxy"):
        Namespace({"field": types.MappingProxyType({})})


def test_cycles_and_depth_are_refused() -> None:
    """A field can't contain itself, nor be nested without limit."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="deeper"):
        Namespace({"x": endless})


def test_errors_name_the_field() -> None:
    """The error gives the path of the bad value."""
    with pytest.raises(ConfigError, match=r"'config\.rope\[1\]' is of type bytes"):
        Namespace({"config": {"rope": [1, b""]}})
    with pytest.raises(ConfigError, match=r"'config' has the key 5"):
        Namespace({"config": {5: 1}})


def test_it_is_immutable() -> None:
    """Changes of the given fields or of returned ones do not affect it."""
    fields = {"a": {"b": [1]}}
    namespace = Namespace(fields)
    before = namespace.hex
    fields["a"]["b"].append(2)
    namespace.document()["fields"]["a"]["b"].append(3)
    assert namespace.document() == {"digest": before, "format": 1, "fields": {"a": {"b": [1]}}}
    assert Namespace(types.MappingProxyType({"a": {"b": [1]}})) == namespace
    with pytest.raises(AttributeError):
        namespace.digest = b""  # type: ignore[misc]


def test_with_fields() -> None:
    """Fields can be added and replaced; the first namespace is unchanged."""
    first = Namespace({"a": 1, "salt": ""})
    second = first.with_fields(salt="mine", b=2)
    assert second == Namespace({"a": 1, "b": 2, "salt": "mine"})
    assert first == Namespace({"a": 1, "salt": ""}) != second
    assert first.with_fields() == first
    assert first != "a"
    assert first.hex[:16] in repr(first)


def test_fields_added_to_unknown_ones_make_another_namespace() -> None:
    """Two namespaces with unknown fields stay different when the same field is added."""
    first, second = Namespace.of_digest(bytes(32)), Namespace.of_digest(b"1" * 32)
    added = {each.with_fields(codec="zstd") for each in (first, second)}
    assert len({first, second, *added}) == 4
    assert [each.description() for each in added] == [b"", b""]
    assert first.with_fields() == first
