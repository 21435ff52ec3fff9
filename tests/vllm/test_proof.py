"""Engines and requests whose blocks may be wrong for another prompt: kvstore stores and loads nothing."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm import PoolingParams, SamplingParams
from vllm.config import PoolerConfig
from vllm.inputs.engine import mm_input
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvstore.errors import ConfigError
from kvstore.vllm import proof
from kvstore.vllm.compat import mark_media_of_clients
from kvstore.vllm.proof import check_engine, doubt_of_engine, doubt_of_request
from tests.vllm.engine_config import configured
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
    return configured(model, max_model_len=512, block_size=64, **options)


def root_of(version: str) -> Path:
    """Return the directory of a version's packages."""
    if not is_there(version):
        pytest.skip(f"vLLM {version} is not here: scripts/vllm_versions.sh makes it, and needs a package index")
    return Path(vllm.__file__).parents[1] if version == INSTALLED else overlay(version)


@pytest.mark.engine
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


@pytest.mark.engine
def test_engine_without_prefix_caching_loads(start: Start, tmp_path: Path) -> None:
    """Without a cache on the device, all full blocks come from kvstore."""
    engine = start(offloading=managed(tmp_path), llm={"enable_prefix_caching": False})
    for _ in range(2):
        (answer,) = engine.ask(prompt(1, 333))
        engine.call("settle")
    assert answer["cached"] == full_blocks(333)


def test_prefix_caching_that_vllm_does_not_use_is_doubted(model: Path, tmp_path: Path) -> None:
    """Neither an operator's word nor a later change hides that vLLM would turn prefix caching off."""
    assert doubt_of_engine(config(model), None) is None
    off = config(model, enable_prefix_caching=False)
    assert doubt_of_engine(off, None) is None
    assert not off.cache_config.enable_prefix_caching, "the configuration on trial is the engine's"
    latent = make_tiny_mla(tmp_path / "latent")
    pooling: dict[str, Any] = {"runner": "pooling", "convert": "embed"}
    mean = pooling | {"pooler_config": PoolerConfig(seq_pooling_type="MEAN")}
    for options, model_ in (({}, latent), ({"enable_prefix_caching": False}, latent), (mean, model)):
        assert doubt_of_engine(config(model_, **options), None), options
    last = pooling | {"pooler_config": PoolerConfig(seq_pooling_type="LAST")}
    assert doubt_of_engine(config(model, **last), None) is None


def test_configuration_on_trial_leaves_variables_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM sets both variables for each configuration."""
    off = config(model, enable_prefix_caching=False)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.delenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", raising=False)
    assert doubt_of_engine(off, None) is None
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert "VLLM_DISABLE_SHARED_EXPERTS_STREAM" not in os.environ


def test_trial_that_fails_leaves_variables_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that can't be tried is doubted."""
    off = config(model, enable_prefix_caching=False)

    def fail(self: object) -> None:
        os.environ["VLLM_TRIAL"] = "1"
        raise ValueError("not on this platform")

    monkeypatch.setattr(type(off), "__post_init__", fail)
    assert doubt_of_engine(off, None) is not None
    assert "VLLM_TRIAL" not in os.environ


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
    root = root_of(version)
    found = {str(path.relative_to(root)) for path in root.glob("vllm/**/*.py") if _TURNED_OFF in path.read_text()}
    assert found == _KNOWN.keys()


def request(**fields: Any) -> Any:
    """Return vLLM's ``Request`` for a prompt."""
    sampling = fields.pop("sampling", {})
    return Request("request", prompt(1, 100), SamplingParams(max_tokens=1, **sampling), None, **fields)


def medium(identifier: str) -> MultiModalFeatureSpec:
    """Return an image at the start of a prompt."""
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=0, length=64)
    )


def test_requests_with_ambiguous_keys_are_doubted() -> None:
    """Media named by clients, and embeddings beside tokens, share keys with other content; all others do not."""
    content = "0123456789abcdef" * 4
    sampling = {"n": 3, "temperature": 0.7, "logprobs": 2, "stop": ["end"], "prompt_logprobs": 1}
    for proven in ({}, {"cache_salt": "tenant", "priority": 3}, {"resumable": True}, {"sampling": sampling}):
        assert doubt_of_request(request(**proven)) is None
    for identifier in (content, content * 2, f"adapter:{content}"):
        assert doubt_of_request(request(mm_features=[medium(identifier)])) is None
    named = ("holiday.png", content[1:], f"{content}.png", content.upper())
    for identifier in (*named, f"client-{content}", f"adapter:client-{content}"):
        doubt = doubt_of_request(request(mm_features=[medium(content), medium(identifier)]))
        assert doubt is not None and doubt.cause == "media", identifier
    doubt = doubt_of_request(request(prompt_is_token_ids=[True, False] * 50))
    assert doubt is not None and doubt.cause == "embeddings"


def test_unknown_setting_of_a_request_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of vLLM may have added it; while it is not set, it does not matter."""
    asked = request()
    for value in (None, False, 0, "", []):
        asked.invented = value
        assert doubt_of_request(asked) is None
    asked.invented = object()
    doubt = doubt_of_request(asked)
    assert doubt is not None and doubt.cause == "unknown" and "invented" in doubt.text
    pooled = Request("pooled", prompt(1, 100), None, PoolingParams(task="embed"))
    assert doubt_of_request(pooled) is None
    for table, some in (("_SAMPLING", request(sampling={"top_k": 5})), ("_POOLING", pooled)):
        known = {reason: names.replace("top_k", "").replace("task", "") for reason, names in vars(proof)[table].items()}
        with monkeypatch.context() as patch:
            patch.setattr(proof, table, known)
            doubt = doubt_of_request(some)
            assert doubt is not None and doubt.cause == "unknown"


def _attributes(tree: ast.ClassDef) -> Iterator[str]:
    """Yield the annotated fields of a class, and the attributes that its constructor sets."""
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                    yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("file", "name", "table"),
    [
        ("v1/request.py", "Request", "_REQUEST"),
        ("sampling_params.py", "SamplingParams", "_SAMPLING"),
        ("pooling_params.py", "PoolingParams", "_POOLING"),
    ],
)
def test_every_setting_of_a_request_is_known(file: str, name: str, table: str, version: str) -> None:
    """Each is part of the keys, judged, or irrelevant for a reason; an invented one is not."""
    (tree,) = (
        node
        for node in ast.parse((root_of(version) / "vllm" / file).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    known = {each for names in vars(proof)[table].values() for each in names.split()}
    assert set(_attributes(tree)) - known == set()
    tree.body += ast.parse("invented: int = 0").body
    assert set(_attributes(tree)) - known == {"invented"}


class Images:
    """Two images of a prompt."""

    def __len__(self) -> int:
        return 2

    def get_all_items_for_hash(self) -> list[bytes]:
        """Return their contents."""
        return [b"one", b"two"]


def test_front_end_marks_media_of_clients() -> None:
    """A name that is hashed together with options of the processor is marked like a plain one; content is not."""
    mark_media_of_clients()
    mark_media_of_clients()
    found = {}
    for options in ({}, {"size": 3}):
        for names in (None, {"image": [None, "name"]}):
            items: Any = {"image": Images()}
            inputs = ProcessorInputs("", items, names, hf_processor_mm_kwargs=options)
            found[bool(options), bool(names)] = inputs.get_mm_hashes("model", "sha256")["image"]
    for (has_options, named), (first, second) in found.items():
        assert first == found[has_options, False][0] and len(first) == 64
        assert second.startswith("client-") == named
    assert found[False, True][1] == "client-name"
    assert len(found[True, True][1]) == len("client-") + 64


def test_names_of_clients_stay_marked_when_a_model_hashes_them_again() -> None:
    """As processors of DeepSeek-VL2 and Qwen3-VL do; hashes of content, and a model called alike, are not marked."""
    mark_media_of_clients()
    content = MultiModalHasher.hash_kwargs("sha256", image=b"one")
    again = [MultiModalHasher.hash_kwargs("sha256", mm_hash=name, cropping=True) for name in (content, "client-name")]
    assert [name.startswith("client-") for name in again] == [False, True]
    images: Any = {"image": Images()}
    hashes = ProcessorInputs("", images).get_mm_hashes("client-model", "sha256")["image"]
    assert not any(name.startswith("client-") for name in hashes)


def test_hashes_of_media_count_as_content_if_vllm_has_made_them(model: Path) -> None:
    """A request with hashes of its client is doubted, as of ``/inference/v1/generate``, whatever they look like."""
    mark_media_of_clients()
    front_end: Any = InputProcessor(config(model))
    front_end.mm_encoder_cache_size = 64
    has_tasks = "supported_tasks" in inspect.signature(front_end.process_inputs).parameters
    tasks = {"supported_tasks": ("generate",)} if has_tasks else {}
    made = [MultiModalHasher.hash_kwargs("sha256", model_id="model", image=image) for image in (b"one", b"two")]
    copied = [hash_.encode().decode() for hash_ in made]
    for hashes, cause in ((made, None), ([made[0], "0" * 64], "media"), (copied, "media")):
        media = {"image": hashes}
        places = {"image": [PlaceholderRange(offset=32 * number, length=32) for number in range(2)]}
        inputs: Any = mm_input(prompt(1, 100), {"image": [None, None]}, media, places)
        sent = front_end.process_inputs("request", inputs, SamplingParams(max_tokens=1), **tasks)
        sent = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))
        assert [feature.identifier for feature in sent.mm_features] == hashes
        doubt = doubt_of_request(Request.from_engine_core_request(sent, None))
        assert (doubt and doubt.cause) == cause


@pytest.mark.engine
@pytest.mark.parametrize("manager", ["kvstore", "vllm"])
def test_embeddings_beside_tokens_are_neither_stored_nor_loaded(manager: str, model: Path, tmp_path: Path) -> None:
    """A prompt with an embedding and one with token 0 in its place get their own answers, also after a restart."""
    text, llm = prompt(1, 320), {"enable_prompt_embeds": True}
    embedded = [not 96 <= place < 224 for place in range(320)]
    # Tokens 0, in place of a block of the embeddings.
    other, fewer = [0 if 128 <= place < 160 else token for place, token in enumerate(text)], list(embedded)
    fewer[128:160] = [True] * 32
    engines: list[Engine] = []

    def answers_of(**options: Any) -> list[dict[str, Any]]:
        engines.append(Engine(model, tmp_path / f"{len(engines)}.log", llm=llm, **options))
        answers = []
        for tokens, mask in ((text, embedded), (other, fewer)):
            engines[-1].call("forget_device")
            answers.append(engines[-1].call("ask_mixed", tokens, mask))
        answers += engines[-1].ask(prompt(2, 100))
        engines[-1].call("settle")
        return answers

    try:
        expected = answers_of()
        assert expected[0]["tokens"] != expected[1]["tokens"]
        offloading = managed(tmp_path / "kv", manager=manager)
        for cached in (0, full_blocks(100)):
            answers = answers_of(offloading=offloading)
            assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
            assert [answer["cached"] for answer in answers] == [0, 0, cached]
            assert engines[-1].text().count("a row of prompt embeddings") == 1
            assert engines[-1].call("metrics")["vllm:kvstore_unproven_requests{embeddings}"] == 2
    finally:
        for engine in engines:
            engine.kill()
