"""Which settings of vLLM separate caches: every one, except those known to change no block."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import KVEventsConfig, KVTransferConfig, MultiModalConfig, SchedulerConfig
from vllm.envs import environment_variables

from examples.tiny_llama import LlamaShape, make_tiny_llama
from kvstore.namespace import Namespace
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.irrelevant import FIELDS, VARIABLES
from kvstore.vllm.namespace import engine_namespace
from tests.vllm.engine_config import configured
from tests.vllm.harness import offloading_config, parallel
from tests.vllm.versions import INSTALLED, VERSIONS, is_there, overlay


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment, in which vLLM sets variables when it makes a configuration."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("VLLM_")]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two models, the second to draft for the first."""
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_llama(folder / "model"), make_tiny_llama(folder / "draft", LlamaShape(layers=1))


def namespace(model: Path, set_after: dict[str, Any] | None = None, **arguments: Any) -> Namespace:
    """Return the namespace of an engine with these arguments, and with fields set afterwards (``part.field``)."""
    config = configuration(model, **arguments)
    for place, value in (set_after or {}).items():
        *parts, field = place.split(".")
        part: Any = config
        for name in parts:
            part = getattr(part, name)
        assert hasattr(part, field), place
        object.__setattr__(part, field, value)
    return namespace_of(config)


def configuration(model: Path, **arguments: Any) -> Any:
    """Return vLLM's configuration of an engine with these arguments."""
    transfer = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both", engine_id="one")
    return configured(model, **{"kv_transfer_config": transfer, **arguments})


def namespace_of(config: Any) -> Namespace:
    """Return the namespace of an engine with this configuration."""
    offloading = offloading_config([], extra_config={"numerics": "test"})
    return engine_namespace(SimpleNamespace(config=offloading), 4096, EngineContext(config))


SAME_ARGUMENTS: dict[str, dict[str, Any]] = {
    "batch size": {"max_num_seqs": 7},
    "tokens per step": {"max_num_batched_tokens": 5000},
    "memory fraction": {"gpu_memory_utilization": 0.5},
    "memory of the KV cache": {"kv_cache_memory_bytes": 1 << 28},
    "blocks": {"num_gpu_blocks_override": 100},
    "longest context": {"max_model_len": 1024},
    "eager": {"enforce_eager": True},
    "optimization level": {"optimization_level": 0},
    "compilation": {"compilation_config": {"mode": 0}},
    "performance mode": {"performance_mode": "throughput"},
    "seed of sampling": {"seed": 7},
    "public name": {"served_model_name": ["a", "b"]},
    "revision": {"revision": "main"},
    "revision of the tokenizer": {"tokenizer_revision": "main"},
    "log probabilities": {"max_logprobs": 3},
    "kind of log probabilities": {"logprobs_mode": "raw_logits"},
    "no tokenizer": {"skip_tokenizer_init": True},
    "generation config": {"generation_config": "vllm"},
    "generation overrides": {"override_generation_config": {"temperature": 0.5}},
    "a token of the hub": {"hf_token": "hf_abc"},
    "local media": {"allowed_local_media_path": "/tmp"},
    "load format": {"load_format": "safetensors"},
    "progress bar": {"use_tqdm_on_load": False},
    "download directory": {"download_dir": "/tmp/elsewhere"},
    "load strategy": {"safetensors_load_strategy": "eager"},
    "executor": {"distributed_executor_backend": "mp"},
    "loading workers": {"max_parallel_loading_workers": 2},
    "all reduce": {"disable_custom_all_reduce": True},
    "scheduling policy": {"scheduling_policy": "priority"},
    "asynchronous scheduling": {"async_scheduling": False},
    "no chunked prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
    "long prompts": {"long_prefill_token_threshold": 64},
    "stream interval": {"stream_interval": 5},
    "traces": {"collect_detailed_traces": None, "show_hidden_metrics_for_version": "0.31"},
    "metrics of the KV cache": {"kv_cache_metrics": True},
    "structured outputs": {"structured_outputs_config": {"backend": "xgrammar"}},
    "events": {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:5599")},
    "no prefix caching": {"enable_prefix_caching": False},
    "retention of states": {"prefix_cache_retention_interval": 256},
    "cache of media": {"mm_processor_cache_gb": 1.0},
    "shutdown": {"shutdown_timeout": 30},
    "API servers": {"_api_process_count": 4, "_api_process_rank": 1},
    "offloaded weights": {"cpu_offload_gb": 1.0},
    "replicas": {"data_parallel_size": 2, "data_parallel_rpc_port": 29777},
    "connector": {"kv_transfer_config": KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")},
    "another engine": {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_role="kv_both",
            engine_id="abc",
            kv_connector_module_path="kvstore.vllm",
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 30, "password": "hunter2"},
        )
    },
}
SAME_FIELDS: dict[str, Any] = {
    "instance_id": "another",
    "cache_config.num_gpu_blocks": 4711,
    "cache_config.num_cpu_blocks": 47,
    "cache_config.kv_cache_size_tokens": 4711,
    "cache_config.kv_cache_max_concurrency": 2.5,
    "cache_config.hash_block_size": 64,
    "cache_config.cache_hit_alignment_tokens": 64,
    "cache_config.effective_attention_block_size": 64,
    "cache_config.kv_offloading_size": 4.0,
    "parallel_config.rank": 3,
    "parallel_config.node_rank": 1,
    "parallel_config.master_port": 12345,
    "parallel_config.data_parallel_rank": 1,
    "parallel_config.data_parallel_index": 1,
    "parallel_config.data_parallel_master_port": 4711,
    "parallel_config._data_parallel_master_port_list": [1, 2, 3],
    "parallel_config.numa_bind": True,
    "parallel_config.enable_eplb": True,
    "parallel_config.distributed_timeout_seconds": 77,
    "model_config.enable_sleep_mode": True,
    "model_config.disable_cascade_attn": True,
    "model_config.pooler_config": SimpleNamespace(pooling_type="MEAN"),
    "scheduler_config.encoder_cache_size": 4711,
    "scheduler_config.max_num_encoder_input_tokens": 4711,
    "scheduler_config.watermark": 0.5,
    "kernel_config.enable_flashinfer_autotune": True,
    "compilation_config.static_forward_context": {},
    "compilation_config.cache_dir": "/tmp/cache",
    "profiler_config.profiler": "torch",
    "observability_config.otlp_traces_endpoint": "http://collector:4317",
}
SAME_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_LOG_STATS_INTERVAL": "1",
    "VLLM_PORT": "4711",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_API_KEY": "secret",
    "VLLM_CACHE_ROOT": "/tmp/cache",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "77",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_SERVICE_HOST": "10.0.0.1",
    "VLLM_LLAMA_SERVICE_PORT_HTTP": "8000",
    "VLLM_LLAMA_PORT_8000_TCP_ADDR": "10.0.0.1",
    "VLLM_DIST_IDENT": "vllm_dist_33ccb954",
}
SAME = {
    **{name: (arguments, {}, {}) for name, arguments in SAME_ARGUMENTS.items()},
    **{name: ({}, {name: value}, {}) for name, value in SAME_FIELDS.items()},
    **{name: ({}, {}, {name: value}) for name, value in SAME_VARIABLES.items()},
}


@pytest.mark.parametrize("change", SAME)
def test_a_change_that_matters_to_no_block_keeps_the_cache(change: str, models: tuple[Path, Path]) -> None:
    """Capacities, addresses, processes, schedules, logs, secrets and rounding are free to change."""
    arguments, fields, variables = SAME[change]
    first = namespace(models[0])
    os.environ.update(variables)
    assert namespace(models[0], fields, **arguments).document() == first.document()


@pytest.mark.parametrize(("load_format", "namespaces"), [("auto", 1), ("dummy", 2)])
def test_portable_rows_are_shared_under_real_configurations(
    models: tuple[Path, Path], load_format: str, namespaces: int
) -> None:
    """No setting that vLLM derives from the tensor parallel size separates portable rows, except random weights."""
    found = set()
    for size in (1, 2):
        sizes = parallel(tp_size=size, world_size=size, is_parallelism_agnostic=True)
        offloading = offloading_config([], parallel=sizes, canonical_layout=True)
        config = configuration(models[0], tensor_parallel_size=size, load_format=load_format)
        found.add(engine_namespace(SimpleNamespace(config=offloading), 4096, EngineContext(config)))
    assert len(found) == namespaces


OTHER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float32"},
    "KV dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "rotary embedding": {
        "hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}
    },
    "an override": {"hf_overrides": {"rms_norm_eps": 1e-5}},
    "type of states": {"mamba_cache_dtype": "float32"},
    "code": {"trust_remote_code": True},
    "random weights": {"load_format": "dummy"},
    "LoRA": {"enable_lora": True},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
    "more ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
    "additional": {"additional_config": {"plugin": 1}},
    "attention": {"attention_backend": "FLEX_ATTENTION"},
}
OTHER_FIELDS: dict[str, Any] = {
    "model_config.quantization": "fp8",
    "model_config.code_revision": "v2",
    "model_config.model_impl": "transformers",
    "model_config.disable_sliding_window": True,
    "model_config.runner": "pooling",
    "cache_config.mamba_cache_mode": "align",
    "cache_config.mamba_block_size": 512,
    "cache_config.mamba_ssm_cache_dtype": "float16",  # vLLM replaces the argument on processors with AVX-512 BF16.
    "cache_config.kv_cache_dtype_skip_layers": ["0"],
    "cache_config.kv_sharing_fast_prefill": True,
    "cache_config.use_replayssm": True,
    "parallel_config.cp_kv_cache_interleave_size": 16,
    "parallel_config.worker_cls": "own.Worker",
    "mamba_config.enable_stochastic_rounding": True,
    "attention_config.indexer_kv_dtype": "fp8",
    "kernel_config.moe_backend": "triton",
    "scheduler_config.disable_hybrid_kv_cache_manager": True,
}
MEDIA_FIELDS: dict[str, Any] = {
    "model_config.multimodal_config.mm_processor_kwargs": {"max_pixels": 1 << 20},
    "model_config.multimodal_config.media_io_kwargs": {"video": {"num_frames": 8}},
    "model_config.multimodal_config.limit_per_prompt": {"video": {"count": 1, "num_frames": 8}},
    "model_config.multimodal_config.video_pruning_rate": 0.5,
    "model_config.multimodal_config.mm_encoder_attn_dtype": "fp8",
}
OTHER_VARIABLES = {
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_MARLIN_INPUT_DTYPE": "fp8",
    "VLLM_PLUGINS": "own",
    "VLLM_PP_LAYER_PARTITION": "1,1",
    "VLLM_OF_A_NEWER_VERSION": "1",
}


def test_each_change_that_may_matter_has_a_cache_of_its_own(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats, precision, input, weights and everything unknown separate caches, from the first one and each other."""
    monkeypatch.setitem(environment_variables, "VLLM_OF_A_NEWER_VERSION", lambda: None)
    model, draft = models
    plain = namespace(model)
    found = {name: namespace(model, **arguments) for name, arguments in OTHER_ARGUMENTS.items()}
    found |= {name: namespace(model, {name: value}) for name, value in OTHER_FIELDS.items()}
    for name, value in {"media": 0, **MEDIA_FIELDS}.items():
        media = {"model_config.multimodal_config": MultiModalConfig()}
        found[name] = namespace(model, media if name == "media" else {**media, name: value})
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    found["draft"] = namespace(model, speculative_config=speculative)
    make_tiny_llama(draft, LlamaShape(layers=1, seed=5))
    found["other weights of the draft"] = namespace(model, speculative_config=speculative)
    for name, value in OTHER_VARIABLES.items():
        os.environ[name] = value
        found[name] = namespace(model)
        del os.environ[name]
    assert namespace(model) == plain
    names: dict[Namespace, str] = {plain: "unchanged"}
    for name, each in found.items():
        assert names.setdefault(each, name) == name


def test_two_starts_have_equal_documents(models: tuple[Path, Path]) -> None:
    """No address, random name, port or order of a set is part of a namespace."""
    lora = {"enable_lora": True, "lora_target_modules": ["q_proj", "v_proj"]}
    spec = {"speculative_config": {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": 2}}
    for arguments in ({}, lora, spec):
        first, second = (namespace(models[0], **arguments) for _ in range(2))
        assert first.document() == second.document()
        assert " at 0x" not in json.dumps(first.document())


def test_no_secret_is_part_of_a_namespace(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace is stored in the clear: values of secrets, and users of URLs, are left out."""
    for name in ("VLLM_NEW_API_KEY", "VLLM_NEW_PASSWORD"):
        monkeypatch.setitem(environment_variables, name, lambda: None)
        monkeypatch.setenv(name, "hunter2")
    fields = {
        "load_config.model_loader_extra_config": {"s3_secret_access_key": "hunter2", "concurrency": 16},
        "additional_config": {"api_key": "hunter2", "url": "https://user:hunter2@host/path"},
        "model_config.hf_overrides": {"hf_token": "hunter2"},
    }
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    text = json.dumps(namespace(models[0], fields).document())
    assert "hunter2" not in text
    assert "https://host/path" in text
    assert "concurrency" in text


@dataclasses.dataclass
class NewConfig:
    """A configuration that kvstore does not know."""

    threshold: int = 1
    dtype: torch.dtype = torch.float16
    kinds: frozenset[str] = frozenset({"b", "a"})


def test_an_invented_setting_counts(models: tuple[Path, Path]) -> None:
    """A setting of a later version of vLLM separates caches, wherever it stands, until a list calls it irrelevant."""

    def found(place: str, value: Any) -> Namespace:
        config = configuration(models[0])
        part = getattr(config, place) if place else config
        fields = [("invented", Any, None)]
        cls = dataclasses.make_dataclass(type(part).__name__, fields, bases=(type(part),), kw_only=True)
        object.__setattr__(part, "__class__", cls)
        object.__setattr__(part, "invented", value)
        return namespace_of(config)

    for place in ("", "cache_config", "model_config", "scheduler_config", "parallel_config"):
        values = [
            None,
            1,
            2,
            NewConfig(),
            NewConfig(2),
            NewConfig(dtype=torch.float32),
            NewConfig(kinds=frozenset("a")),
            # Equal to the default, and of another type.
            NewConfig(threshold=True),
            NewConfig(threshold=1.0),  # type: ignore[arg-type]
        ]
        assert len({found(place, value) for value in values}) == len(values)


def test_irrelevant_settings_stay_irrelevant_in_a_subclass(models: tuple[Path, Path]) -> None:
    """A plugin or a new version may derive from a configuration of vLLM; then its own settings count."""

    def found(**fields: Any) -> Namespace:
        config = configuration(models[0])
        cls = dataclasses.make_dataclass("Derived", [("own", int, 0)], bases=(SchedulerConfig,), kw_only=True)
        object.__setattr__(config.scheduler_config, "__class__", cls)
        for name, value in {"own": 0, **fields}.items():
            object.__setattr__(config.scheduler_config, name, value)
        return namespace_of(config)

    assert found() == found(max_num_seqs=7) != found(own=1)


def test_scales_of_a_media_encoder_count_by_content(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Scales calibrated again under the same name give other blocks; the same ones elsewhere do not."""

    def found(name: str, scales: str) -> Namespace:
        (tmp_path / name).write_text(scales)
        fields = {"model_config.multimodal_config": MultiModalConfig()}
        place = "model_config.multimodal_config.mm_encoder_fp8_scale_path"
        return namespace(models[0], {**fields, place: str(tmp_path / name)})

    assert found("one", "1.5") == found("two", "1.5") != found("one", "2.5")


def test_each_spelling_of_a_draft_models_path_is_the_same(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the model's own path."""
    monkeypatch.chdir(models[1].parent)
    spellings = [str(models[1]), f"{models[1]}/", "draft", "./draft"]
    asked = [{"method": "draft_model", "model": each, "num_speculative_tokens": 2} for each in spellings]
    assert len({namespace(models[0], speculative_config=each) for each in asked}) == 1


COUNTING = {
    cls: set(names.split())
    for cls, names in {
        "AttentionConfig": """
            disable_flashinfer_q_quantization flash_attn_max_num_splits_for_cuda_graph flash_attn_version
            flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size
            hisparse_config indexer_kv_dtype indexer_sparse_logits indexer_tp_shard_min_rows
            minimax_m3_indexer_cp minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa
            tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph trtllm_ragged_backend use_non_causal
            use_prefill_query_quantization use_trtllm_attention
        """,
        "CacheConfig": """
            cache_dtype is_attention_free kv_cache_dtype_skip_layers kv_sharing_fast_prefill
            mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype
            prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len sliding_window
            swa_bounded_replay use_kda_recoverssm use_replayssm
        """,
        "DiffusionConfig": "canvas_length max_denoising_steps",
        "KVTransferConfig": "enable_permute_local_kv",
        "KernelConfig": "linear_backend linear_backend_per_quant moe_backend monokernel sparse_indexer_topk_backend",
        "LoRAConfig": """
            default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras
            enable_tower_connector_lora lora_dtype max_lora_cls_labels target_modules
        """,
        "LoadConfig": "ignore_patterns model_loader_extra_config",
        "MambaConfig": "backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds",
        "ModelConfig": """
            code_revision convert disable_sliding_window dtype enable_prompt_embeds hf_config hf_overrides
            io_processor_plugin is_submodel_config model_class_overrides model_impl multimodal_config
            quantization quantization_config runner trust_remote_code word_embeddings_untied_by_checkpoint
        """,
        "MultiModalConfig": """
            allow_missing_mm_embeddings enable_mm_embeds language_model_only limit_per_prompt
            media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
            mm_encoder_only mm_hasher_algorithm mm_processor_kwargs
            video_pruning_method video_pruning_rate
        """,
        "ParallelConfig": """
            _allow_auto_resolve_cp_interleave_size all2all_backend cp_kv_cache_interleave_size
            dcp_kv_cache_interleave_size enable_expert_parallel enable_hc_sp expert_placement_strategy
            is_moe_model sd_worker_cls worker_cls worker_extension_cls
        """,
        "QuantSpec": "activation weight",
        "QuantizationConfigArgs": "ignore linear moe targets",
        "SchedulerConfig": "disable_hybrid_kv_cache_manager is_multimodal_model runner_type scheduler_cls",
        "SpeculativeConfig": """
            attention_backend code_revision disable_eagle_block_drop disable_padded_drafter_batch
            draft_lm_head_quantization draft_model_config index_share_for_mtp_iteration kv_cache_dtype
            method moe_backend num_speculative_tokens num_speculative_tokens_per_batch_size
            parallel_drafting quantization use_heterogeneous_vocab
        """,
        "VllmConfig": """
            additional_config attention_config cache_config device_config diffusion_config engram_config
            kernel_config kv_transfer_config load_config lora_config mamba_config model_config
            parallel_config scheduler_config speculative_config
        """,
    }.items()
}
"""Fields that count, of all supported versions. A new one belongs here or on the list of irrelevant ones."""

COUNTING_VARIABLES = """
VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CPU_INT4_W4A8 VLLM_DEEPEPLL_NVFP4_DISPATCH
VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE
VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DISABLED_KERNELS
VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS
VLLM_ENABLE_HPC_OPS VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION
VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_MOE_GEMM_TYPE
VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM VLLM_KIMI_K3_GEMM_AR
VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_MARLIN_INPUT_DTYPE VLLM_MARLIN_USE_ATOMIC_ADD
VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S
VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MEDIA_CONNECTOR
VLLM_MLA_DISABLE VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM
VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_PLUGINS VLLM_PP_LAYER_PARTITION
VLLM_REPLICATE_EMBED VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_ASM_PADDING
VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_MFMA_PAGE_ATTN
VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE VLLM_ROCM_MUSE_MOE_ONLINE_QUANT
VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB
VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FP4BMM
VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS
VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA
VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2
VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE
VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM
VLLM_SSM_CONV_STATE_LAYOUT VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_TEST_FORCE_LOAD_FORMAT VLLM_TRITON_USE_TD
VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_A2A
VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FLASHINFER_MOE_INT4
VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_USE_OINK_OPS VLLM_USE_TRITON_AWQ
VLLM_VIDEO_LOADER_BACKEND VLLM_XLA_USE_SPMD VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND
VLLM_ZENTORCH_WEIGHT_PREPACK
"""


def settings(folder: Path) -> dict[str, dict[str, str]]:
    """Return the annotations of the fields of each configuration class in a package, without importing it."""
    own: dict[str, dict[str, str]] = {}
    bases: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and re.search(r"\b(config|dataclass)\b", decorators(node)):
                bases[node.name] = [ast.unparse(base) for base in node.bases]
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                own[node.name] = {
                    ast.unparse(each.target): ast.unparse(each.annotation)
                    for each in fields
                    if not re.match("ClassVar|InitVar", ast.unparse(each.annotation))
                }
    return {
        name: {field: kind for cls in (*bases[name], name) for field, kind in own.get(cls, {}).items()} for name in own
    }


def decorators(node: ast.ClassDef) -> str:
    """Return the text of a class's decorators."""
    return " ".join(map(ast.unparse, node.decorator_list))


def unlisted(classes: dict[str, dict[str, str]]) -> list[str]:
    """Return the fields, reachable from ``VllmConfig`` through fields that count, that are on no list."""
    found, seen, todo = [], set(), ["VllmConfig"]
    while todo:
        cls = todo.pop()
        if cls not in seen:
            seen.add(cls)
            relevant = {name: kind for name, kind in classes[cls].items() if name not in FIELDS.get(cls, {})}
            found += [f"{cls}.{name}" for name in sorted(relevant.keys() - COUNTING.get(cls, set()))]
            todo += [word for kind in relevant.values() for word in re.findall(r"\w+", kind) if word in classes]
    assert len(seen) > 10
    return found


def folder_of(version: str) -> Path:
    """Return the package of a version of vLLM."""
    if not is_there(version):
        pytest.skip(f"vLLM {version} is not here: scripts/vllm_versions.sh makes it, and needs a package index")
    return Path(vllm.__file__).parent if version == INSTALLED else overlay(version) / "vllm"


@pytest.mark.parametrize("version", VERSIONS)
def test_each_field_of_each_version_is_on_a_list(version: str) -> None:
    """A new field of vLLM is noticed here, where someone decides whether it changes blocks; until then it counts."""
    assert unlisted(settings(folder_of(version) / "config")) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_each_variable_of_each_version_is_on_a_list(version: str) -> None:
    """A new variable of vLLM is noticed as well."""
    tree = ast.parse((folder_of(version) / "envs.py").read_text())
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict) and len(node.keys) > 100]
    names = {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}
    assert len(names) > 250
    ours = {str(name) for name in names if str(name).startswith("VLLM_")}
    assert sorted(ours - VARIABLES.keys() - set(COUNTING_VARIABLES.split())) == []


def test_the_census_notices_an_invented_field() -> None:
    """The two tests above fail for a field that is on no list, also of a class that is new."""
    classes = settings(folder_of(INSTALLED) / "config")
    classes["CacheConfig"]["invented"] = "NewConfig | None"
    classes["NewConfig"] = {"threshold": "int"}
    assert unlisted(classes) == ["CacheConfig.invented", "NewConfig.threshold"]


def test_lists_contain_only_existing_fields_once() -> None:
    """A list that names fields of no supported version is not maintained."""
    known: dict[str, set[str]] = {}
    for version in filter(is_there, VERSIONS):
        for cls, fields in settings(folder_of(version) / "config").items():
            known.setdefault(cls, set()).update(fields)
    assert not VARIABLES.keys() & set(COUNTING_VARIABLES.split())
    assert not {cls for cls in FIELDS if COUNTING.get(cls, set()) & FIELDS[cls].keys()}
    if all(map(is_there, VERSIONS)):
        assert {cls: fields.keys() - known[cls] for cls, fields in FIELDS.items() if fields.keys() - known[cls]} == {}
