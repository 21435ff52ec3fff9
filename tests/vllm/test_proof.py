"""Engines whose blocks may be wrong for another prompt: kvstore stores and loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import PoolerConfig
from vllm.engine.arg_utils import EngineArgs

from kvstore.errors import ConfigError
from kvstore.vllm.proof import check_engine, doubt_of_engine
from tests.vllm.engines import Engine, Start, full_blocks, managed, prompt
from tests.vllm.models import make_tiny_mla, make_tiny_prefix_lm
from tests.vllm.versions import INSTALLED, VERSIONS, is_there, overlay

pytestmark = pytest.mark.timeout(600)

_TURNED_OFF = "cache_config.enable_prefix_caching = False"
_KNOWN = {
    "vllm/v1/engine/core.py": "attention that is not causal, found by the specification of a group",
    "vllm/config/vllm.py": "found by the configuration on trial",
    "vllm/platforms/cpu.py": "found by the configuration on trial",
    "vllm/model_executor/models/config.py": "found by the configuration on trial",
    "vllm/model_executor/layers/attention/attention.py": "VLLM_BATCH_INVARIANT",
    "vllm/model_executor/layers/attention/mla_attention.py": "VLLM_BATCH_INVARIANT",
}
"""Files in which vLLM turns prefix caching off, with the way in which kvstore finds out."""


def config(model: Path, **options: Any) -> Any:
    """Return the ``VllmConfig`` for a model."""
    return EngineArgs(model=str(model), max_model_len=512, block_size=64, **options).create_engine_config()


@pytest.mark.vllm
@pytest.mark.parametrize(("make", "manager"), [(make_tiny_mla, "kvstore"), (make_tiny_prefix_lm, "vllm")])
def test_engine_without_reusable_blocks_stores_and_loads_nothing(
    make: Callable[[Path], Path], manager: str, tmp_path: Path
) -> None:
    """Prompts with a common prefix get the tokens of an engine without offloading, and the log has the reason once."""
    used, prompts = make(tmp_path / "model"), [prompt(1, 300) + prompt(number, 40) for number in range(3)]
    engines: list[Engine] = []

    def answers_of(**options: Any) -> list[dict[str, Any]]:
        engines.append(Engine(used, tmp_path / f"{len(engines)}.log", llm={"block_size": 64}, **options))
        answers = [engines[-1].ask(text)[0] for text in prompts]
        engines[-1].call("settle")
        engines[-1].kill()
        return answers

    try:
        expected = answers_of()
        for _ in range(2):
            answers = answers_of(offloading=managed(tmp_path / "kv", manager=manager))
            assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
            assert [answer["cached"] for answer in answers] == [0, 0, 0]
            assert engines[-1].text().count("kvstore stores and loads nothing") == 1
            assert "0 blocks found" in engines[-1].text()
    finally:
        for engine in engines:
            engine.kill()


@pytest.mark.vllm
def test_engine_whose_operator_turned_prefix_caching_off_loads(start: Start, tmp_path: Path) -> None:
    """Without a cache on the device, all full blocks come from kvstore."""
    engine = start(offloading=managed(tmp_path), llm={"enable_prefix_caching": False})
    for _ in range(2):
        (answer,) = engine.ask(prompt(1, 333))
        engine.call("settle")
    assert answer["cached"] == full_blocks(333)


def test_prefix_caching_that_vllm_does_not_use_is_doubted(model: Path, tmp_path: Path) -> None:
    """Neither an operator's word nor a later change hides that vLLM would turn prefix caching off."""
    assert doubt_of_engine(config(model), None) is None
    assert doubt_of_engine(config(model, enable_prefix_caching=False), None) is None
    latent = make_tiny_mla(tmp_path / "latent")
    pooling: dict[str, Any] = {"runner": "pooling", "convert": "embed"}
    mean = pooling | {"pooler_config": PoolerConfig(seq_pooling_type="MEAN")}
    for options, model_ in (({}, latent), ({"enable_prefix_caching": False}, latent), (mean, model)):
        assert doubt_of_engine(config(model_, **options), None), options
    last = pooling | {"pooler_config": PoolerConfig(seq_pooling_type="LAST")}
    assert doubt_of_engine(config(model, **last), None) is None


def test_attention_that_is_not_causal_is_doubted(model: Path) -> None:
    """Its blocks depend on later tokens, also where prefix caching is on."""
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(non_causal=flag)) for flag in (False, True)]
    assert doubt_of_engine(config(model), SimpleNamespace(kv_cache_groups=groups[:1])) is None
    assert doubt_of_engine(config(model), SimpleNamespace(kv_cache_groups=groups))


def test_batch_invariance_without_prefix_caching_is_doubted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some attention backends turn prefix caching off in a worker, of which the configuration has no trace."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert doubt_of_engine(config(model, enable_prefix_caching=False), None)


def test_experts_of_each_token_can_not_be_loaded(model: Path) -> None:
    """An engine that returns them is refused at the start, wherever the version of vLLM has the option."""
    experts = SimpleNamespace(enable_return_routed_experts=True)
    check_engine(config(model))
    for parts in ({"aux_output_config": experts, "model_config": None}, {"model_config": experts}):
        with pytest.raises(ConfigError, match="Leave it out"):
            check_engine(SimpleNamespace(**parts))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_place_that_turns_prefix_caching_off_is_known(version: str) -> None:
    """A new one in a version of vLLM may need a new doubt."""
    if not is_there(version):
        pytest.skip(f"vLLM {version} is not here: scripts/vllm_versions.sh makes it, and needs a package index")
    root = Path(vllm.__file__).parents[1] if version == INSTALLED else overlay(version)
    found = {str(path.relative_to(root)) for path in root.glob("vllm/**/*.py") if _TURNED_OFF in path.read_text()}
    assert found == _KNOWN.keys()
