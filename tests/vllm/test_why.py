"""``kvstore why``: the places of a prompt's blocks, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Namespace, TransferJob, open_tier
from kvstore.cli.tier_argument import parse_tier
from kvstore.primary import Region
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.seal.keyrings import document, secret, write

pytest.importorskip("vllm")

_SLOT_BYTES = 4096
_TOKENS = list(range(100))
"""Six blocks of 16 tokens, and four tokens more."""


def _namespace(**changes: Any) -> Namespace:
    """Return an engine's namespace; ``changes``: of its configuration."""
    from kvstore.vllm.connector import EngineContext
    from kvstore.vllm.namespace import engine_namespace
    from tests.vllm.engine_config import engine
    from tests.vllm.harness import offloading_config

    spec = SimpleNamespace(config=offloading_config([], **changes.pop("offloading", {})))
    return engine_namespace(spec, _SLOT_BYTES, EngineContext(engine(**changes), None))


@pytest.fixture(scope="module")
def ours() -> Namespace:
    """The namespace of the engine in question."""
    return _namespace()


@pytest.fixture(scope="module")
def float8() -> Namespace:
    """The namespace of an engine with another data type."""
    from vllm.v1.kv_offload.config import OffloadingModelConfig

    return _namespace(offloading={"model": OffloadingModelConfig(name="org/model", dtype="float8_e4m3")})


Fill = Callable[..., None]


@pytest.fixture
def fill() -> Fill:
    """Stores the first blocks of the prompt in a tier, as an engine with this namespace does."""

    def filled(text: str, namespace: Namespace, blocks: int, salt: str | None = None, tag: bytes = b"") -> None:
        from kvstore.vllm.prompts import keys_of

        fields = {name: value for name, value in namespace.document()["fields"].items() if name != "keys"}
        keys = [tag + key for key in keys_of(_TOKENS, fields, salt)][:blocks]
        with Region.create(8, _SLOT_BYTES) as region:
            tier = open_tier(
                parse_tier(text).as_config(), primary=region.view(), slot_bytes=_SLOT_BYTES, namespace=namespace
            )
            with closing(tier):
                tier.submit_store(TransferJob(1, keys, range(len(keys))))
                tier.flush()
                assert tier.drain(30)

    return filled


def _tier(path: Path, **more: Any) -> str:
    return json.dumps({"type": "file", "path": str(path), "capacity": "64MiB", "reserve": 0, **more})


def _why(engine: str, *more: str, prompt: Sequence[int] | str = _TOKENS) -> dict[str, Any]:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return report_of(run_here("why", text, "--engine", engine, *more, "--json"))


def test_blocks_are_counted_in_each_tier_and_namespace(
    tmp_path: Path, fill: Fill, ours: Namespace, float8: Namespace
) -> None:
    """The table has the engine's namespace first, and names the argument that separates another one."""
    disk, other = _tier(tmp_path / "a"), _tier(tmp_path / "b", label="shared")
    fill(disk, ours, 2)
    fill(other, float8, 6)
    extra = {"secondary_tiers": [json.loads(disk), json.loads(other)]}
    transfer = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": extra}
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [transfer]}}
    for engine in (extra["secondary_tiers"], extra, transfer, multi):
        own = ("--namespace", ours.hex)
        done = run_here("why", json.dumps(_TOKENS), "--engine", json.dumps(engine), *own, COLUMNS="120")
        assert done.returncode == 0, done.stderr
        _, _, here, empty, foreign = done.stdout.splitlines()
        assert here.split() == ["file", ours.hex[:12], "2", "of", "6", "32", "the", "engine's"]
        assert empty.split() == ["shared", ours.hex[:12], "0", "of", "6", "0", "the", "engine's"]
        assert foreign.split()[:6] == ["shared", float8.hex[:12], "6", "of", "6", "96"]
        assert "--dtype float8_e4m3 (here float16)" in foreign
        assert "vllm:kvstore_missed_blocks" in done.stderr
    fill(disk, ours, 6)
    done = run_here("why", json.dumps(_TOKENS), "--engine", disk, "--namespace", ours.hex)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_tiers_own_fields_are_no_difference(tmp_path: Path, fill: Fill, ours: Namespace) -> None:
    """The engine's namespace is found on a tier with a namespace of its own; an earlier epoch is a difference."""
    plain, named = _tier(tmp_path / "a"), _tier(tmp_path / "b", namespace="mine")
    fill(named, ours.of_epoch("first"), 6)
    fill(plain, ours, 6)
    fill(named, ours, 1)
    engine = json.dumps([json.loads(plain), json.loads(named) | {"label": "named"}])
    rows = _why(engine, "--namespace", ours.hex)["rows"]
    assert {(row["tier"], row["blocks"], row["is_own"]) for row in rows} == {
        ("file", 6, True),
        ("named", 1, True),
        ("named", 6, False),
    }
    assert [row["changes"] for row in rows if not row["is_own"]] == [{"epoch": [None, "first"]}]


def test_the_engines_namespace_is_the_one_used_last_on_any_tier(
    tmp_path: Path, fill: Fill, ours: Namespace, float8: Namespace
) -> None:
    """A namespace that one tier has not seen for long is the engine's if another tier has it as the last one."""
    first, second = _tier(tmp_path / "a"), _tier(tmp_path / "b", label="second")
    for tier, namespace in ((first, ours), (first, float8), (second, ours)):
        fill(tier, namespace, 1)
    rows = _why(json.dumps([json.loads(first), json.loads(second)]))["rows"]
    assert {(row["tier"], row["namespace"]) for row in rows if row["is_own"]} == {
        ("file", ours.hex),
        ("second", ours.hex),
    }


def test_namespaces_of_other_engines_are_left_out(tmp_path: Path, fill: Fill, ours: Namespace) -> None:
    """Blocks of SGLang, say, have other keys, and their namespace is not taken for the engine's."""
    tier = _tier(tmp_path / "kv")
    fill(tier, ours, 2)
    fill(tier, ours.with_fields(engine="sglang"), 6)
    assert [(row["namespace"], row["blocks"]) for row in _why(tier)["rows"]] == [(ours.hex, 2)]


def test_the_first_missing_block_ends_the_tokens(tmp_path: Path, fill: Fill, ours: Namespace) -> None:
    """Blocks behind a missing one count, and the tokens in front of it are those that an engine finds."""
    from kvstore.vllm.prompts import keys_of

    tier = _tier(tmp_path / "kv")
    fill(tier, ours, 6)
    other = [*_TOKENS[:40], *range(1000, 1060)]
    (row,) = _why(tier, prompt=other)["rows"]
    assert (row["blocks"], row["of"], row["tokens"]) == (2, 6, 32)
    assert len(keys_of(other, ours.document()["fields"], None)) == 6
    (row,) = _why(tier, prompt=_TOKENS[:7])["rows"]
    assert (row["blocks"], row["of"], row["tokens"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"cache_config.cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"model_config.quantization": "fp8"}, "--quantization"),
        ({"offloading": {"extra_config": {"numerics": "mine"}}}, "numerics"),
    ],
)
def test_a_changed_setting_is_named_as_operators_give_it(changes: dict[str, Any], name: str, ours: Namespace) -> None:
    """Arguments of vLLM and options of kvstore explain another namespace."""
    from kvstore.cli.holdings.why import differences
    from kvstore.vllm.prompts import name_of

    changed = differences(ours.document()["fields"], _namespace(**changes).document()["fields"])
    assert name in {name_of(field) for field in changed}


def test_details_hide_no_setting(tmp_path: Path, fill: Fill, ours: Namespace) -> None:
    """A changed data type is shown, even if more variables and arguments changed than a table has room for."""
    environment = {f"VLLM_{letter}": "1" for letter in "ABCD"}
    settings = {"cache_config": {"cache_dtype": "fp8"}, "model_config": {"dtype": "bfloat16"}}
    config = {"kv_dtype": "fp8", "settings": settings}
    model = {**ours.document()["fields"]["model"], "dtype": "bfloat16"}
    other = ours.with_fields(environment=environment, engine_config=config, model=model, engine_version="0.99")
    tier = _tier(tmp_path / "kv")
    fill(tier, ours, 1)
    fill(tier, other, 1)
    done = run_here("why", json.dumps(_TOKENS), "--engine", tier, "--namespace", ours.hex, COLUMNS="200")
    shown = "--kv-cache-dtype fp8 (here auto), vLLM 0.99 (here 0.32.0), --dtype bfloat16 (here float16), and"
    assert shown.replace("0.32.0", ours.document()["fields"]["engine_version"]) in done.stdout


@pytest.mark.parametrize(("parts", "tag"), [("", b""), ("tenants", b"tenant-1"), ("adapters", bytes(16))])
def test_salts_tags_and_keyed_names(tmp_path: Path, fill: Fill, ours: Namespace, parts: str, tag: bytes) -> None:
    """A cache_salt makes other keys; the tags of tenants and adapters and keyed names on the medium hide none."""
    write(tmp_path / "keys.json", document(1, 1, names=secret(8)))
    seal = {"aead": {"keys": {"file": str(tmp_path / "keys.json")}, "keyed_names": True}}
    tier = _tier(tmp_path / "kv", codec=[seal])
    fill(tier, ours.with_fields(keys=parts) if parts else ours, 6, salt="mine", tag=tag)
    assert [row["blocks"] for row in _why(tier)["rows"]] == [0]
    assert [row["blocks"] for row in _why(tier, "--cache-salt", "mine")["rows"]] == [6]


def test_a_prompt_is_text_with_a_tokenizer_on_this_machine(tmp_path: Path, fill: Fill, ours: Namespace) -> None:
    """The text of a file is tokenized as by the engine; without the tokenizer, the error names both ways out."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(token): token for token in _TOKENS}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    tier = _tier(tmp_path / "kv")
    fill(tier, ours, 6)
    (tmp_path / "prompt.txt").write_text(" ".join(map(str, _TOKENS)))
    arguments = ("--tokenizer", str(tmp_path / "model"))
    assert [row["blocks"] for row in _why(tier, *arguments, prompt=f"@{tmp_path}/prompt.txt")["rows"]] == [6]
    done = run_here("why", "Hello", "--engine", tier)
    assert done.returncode == 2 and "--tokenizer" in done.stderr and "token ids" in done.stderr


def test_a_prompt_is_as_long_as_a_context(tmp_path: Path, fill: Fill, ours: Namespace) -> None:
    """The token ids of a long prompt, which no argument has room for, are read from a file."""
    tier = _tier(tmp_path / "kv")
    fill(tier, ours, 6)
    (tmp_path / "prompt.json").write_text(json.dumps([*_TOKENS, *range(100_000, 360_000)], indent=1))
    (row,) = _why(tier, prompt=f"@{tmp_path}/prompt.json")["rows"]
    assert (row["blocks"], row["of"], row["tokens"]) == (6, 260_100 // 16, 96)


def test_unreadable_tiers_peers_and_unknown_fields(tmp_path: Path, fill: Fill, ours: Namespace) -> None:
    """A tier that cannot be read is named, and the others are shown; peers have no medium; nothing stored is said."""
    tier, missing = _tier(tmp_path / "kv"), _tier(tmp_path / "no", label="lost")
    peer = {"type": "peer", "peers": ["127.0.0.1:7777"]}
    done = run_here("why", "[1]", "--engine", missing)
    assert done.returncode == 1 and done.stderr.startswith("lost: There is no file tier")
    fill(tier, ours, 1)
    engine = json.dumps([json.loads(tier), json.loads(missing), peer])
    done = run_here("why", json.dumps(_TOKENS), "--engine", engine)
    assert done.returncode == 1 and "1 of 6" in done.stdout
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["lost"]
    (path,) = (tmp_path / "kv").glob("*/namespace.json")
    path.unlink()
    done = run_here("why", json.dumps(_TOKENS), "--engine", tier)
    assert done.returncode == 2 and "fields of namespace" in done.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine_config": {"settings": {"cache_config": {"prefix_caching_hash_algo": "xxhash"}}}}, "PYTHONHASHSEED"),
        ({"engine_config": {"settings": {"cache_config": {"prefix_caching_hash_algo": "md4"}}}}, "md4"),
        ({"tokens_per_hash": 0}, "ZeroDivisionError"),
        ({"groups": []}, "ValueError"),
        ({"groups": [{"tokens_per_block": 8}]}, "a block without tokens"),
    ],
)
def test_a_namespace_with_unknown_keys_costs_only_itself(
    tmp_path: Path, fill: Fill, ours: Namespace, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces of other versions, or whose hash has a seed of its own, are named, and all others are shown."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    tier = _tier(tmp_path / "kv")
    fill(tier, ours, 2)
    other = ours.with_fields(**changes)
    (tmp_path / "kv" / other.hex).mkdir(mode=0o700)
    (tmp_path / "kv" / other.hex / "namespace.json").write_bytes(other.description())
    done = run_here("why", json.dumps(_TOKENS), "--engine", tier, "--namespace", ours.hex, "--json")
    report = report_of(done)
    assert done.returncode == 1
    assert [(row["namespace"], row["blocks"]) for row in report["rows"]] == [(ours.hex, 2)]
    ((name, failure),) = report["failures"].items()
    assert name == f"file, namespace {other.hex[:12]}" and reason in failure


def test_other_tiers_of_an_engine_cost_only_themselves(tmp_path: Path, fill: Fill, ours: Namespace) -> None:
    """Tiers of vLLM are left out, an absent secret hides no other tier, and names are those of the metrics."""
    tier = _tier(tmp_path / "kv")
    fill(tier, ours, 2)
    theirs = {"type": "fs", "root_dir": str(tmp_path)}
    secret_less = {"type": "redis", "url": "redis://127.0.0.1:1", "password": {"env": "KVSTORE_TEST_UNSET"}}
    second = json.loads(_tier(tmp_path / "none"))
    done = run_here("why", json.dumps(_TOKENS), "--engine", json.dumps([theirs, json.loads(tier), secret_less, second]))
    assert done.returncode == 1 and "2 of 6" in done.stdout
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["redis", "file-3"]


@pytest.mark.parametrize(
    "engine",
    [
        "[1]",
        '{"secondary_tiers": 5}',
        '{"kv_connector_extra_config": null}',
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": 3}}',
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [1, null, {}]}}',
    ],
)
def test_a_wrong_configuration_is_an_error(engine: str) -> None:
    """The error names ``secondary_tiers``, and there is no traceback."""
    done = run_here("why", "[1]", "--engine", engine)
    assert done.returncode == 2 and "secondary_tiers" in done.stderr
