"""Settings of vLLM that do not change the bytes of blocks, with reasons. All others count, known or not.

A setting that changes only the rounding of equal computations is listed: how a prompt is divided into steps, whether
the model is compiled, how a sum is communicated. One that changes formats, precision, input or weights is not, nor is
one in doubt.
"""

from __future__ import annotations

from typing import Final

_BUILD: Final = "concerns the build of vLLM, whose version is another field of the namespace"
_CAPACITY: Final = "determines memory, capacity and speed, not content"
_COMPUTING: Final = "changes the rounding of equal computations"
_COUNTED: Final = "is another field of the namespace"
_DERIVED: Final = "is derived from other settings, or measured"
_ENGINE: Final = "names an engine, a process, an address or a user"
_OUTPUT: Final = "concerns output, logs, metrics and debugging"
_PLACE: Final = "is a place of files or a limit of access to them; files count by content"
_PROCESSES: Final = "determines where processes run and how they communicate"
_SAMPLING: Final = "chooses tokens, and keys have the ids of tokens"
_SCHEDULE: Final = "determines when blocks are computed, kept and moved"

_FIELDS: Final[dict[str, dict[str, str]]] = {
    "VllmConfig": {
        _CAPACITY: "offload_config",
        _COMPUTING: "compilation_config optimization_level performance_mode",
        _DERIVED: "quant_config",
        _ENGINE: "instance_id shutdown_timeout",
        _OUTPUT: "aux_output_config logging_config observability_config profiler_config watchdog_config",
        _SAMPLING: "reasoning_config structured_outputs_config watermark_config",
        _SCHEDULE: "ec_manager_config ec_transfer_config kv_events_config weight_transfer_config",
    },
    "ModelConfig": {
        _CAPACITY: "enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode renderer_num_workers "
        "sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
        _COMPUTING: "disable_cascade_attn enforce_eager",
        _COUNTED: "hf_text_config model model_weights",
        _ENGINE: "allow_deprecated_quantization hf_token served_model_name",
        _PLACE: "allowed_local_media_path allowed_media_domains config_format hf_config_path revision "
        "tokenizer_revision",
        _SAMPLING: "enable_trace_replay generation_config logits_processors logprobs_mode max_logprobs "
        "override_generation_config return_sampling_mask seed skip_tokenizer_init tokenizer tokenizer_mode "
        "use_fp64_gumbel",
        _SCHEDULE: "max_model_len spec_target_max_model_len",
        "acts on the output of the last layer": "pooler_config",
    },
    "CacheConfig": {
        _CAPACITY: "gpu_memory_utilization kv_cache_memory_bytes kv_offloading_backend kv_offloading_size "
        "num_gpu_blocks_override",
        _COUNTED: "block_size kv_cache_layout mamba_page_size_padded skip_page_size_padded",
        _DERIVED: "_block_size_resolved cache_hit_alignment_tokens effective_attention_block_size hash_block_size "
        "kv_cache_max_concurrency kv_cache_size_tokens num_cpu_blocks num_gpu_blocks simple_cpu_offload_num_blocks "
        "user_specified_block_size user_specified_mamba_block_size",
        _SCHEDULE: "enable_mamba_shared_prefix_checkpoint enable_prefix_caching prefix_cache_retention_interval",
    },
    "ParallelConfig": {
        _CAPACITY: "enable_elastic_ep elastic_ep_max_dp_size enable_eplb enable_ep_weight_filter eplb_config "
        "max_parallel_loading_workers",
        _COMPUTING: "dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate "
        "disable_custom_all_reduce enable_batch_sharded_sampling enable_dbo ubatch_size",
        _COUNTED: "decode_context_parallel_size pipeline_parallel_size prefill_context_parallel_size "
        "tensor_parallel_size world_size",
        _ENGINE: "_api_process_count _api_process_rank _coord_store_port _data_parallel_master_port_list "
        "cpu_distributed_timeout_seconds data_parallel_index data_parallel_master_ip data_parallel_master_port "
        "data_parallel_rank data_parallel_rank_local data_parallel_rpc_port distributed_timeout_seconds "
        "enable_fault_tolerance fault_tolerance_config master_addr master_port node_rank nnodes rank",
        _OUTPUT: "ray_workers_use_nsight",
        _PROCESSES: "assigned_physical_gpu_ids data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_size data_parallel_size_local disable_nccl_for_dp_synchronization "
        "distributed_executor_backend dp_sync_interval enable_shm_tensor_arena numa_bind numa_bind_cpus "
        "numa_bind_nodes placement_group ray_runtime_env",
    },
    "SchedulerConfig": {
        _CAPACITY: "encoder_cache_size max_num_active_seqs max_num_batched_tokens max_num_encoder_input_tokens "
        "max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs watermark",
        _OUTPUT: "stream_interval",
        _SCHEDULE: "async_scheduling disable_chunked_mm_input enable_chunked_prefill long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive policy prefill_schedule_interval scheduler_reserve_full_isl",
    },
    "DeviceConfig": {_COUNTED: "device device_type"},
    "LoadConfig": {
        _CAPACITY: "device pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads",
        _COUNTED: "load_format",
        _OUTPUT: "use_tqdm_on_load",
        _PLACE: "download_dir",
    },
    "AttentionConfig": {_CAPACITY: "sparse_mla_prefill_workspace_factor", _COUNTED: "backend backend_per_kind"},
    "MultiModalConfig": {
        _CAPACITY: "mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling",
        _COMPUTING: "mm_encoder_tp_mode",
        _COUNTED: "mm_encoder_fp8_scale_path",
        _OUTPUT: "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path",
        _SAMPLING: "interleave_mm_strings",
    },
    "SpeculativeConfig": {
        _CAPACITY: "suffix_decoding_max_cached_requests",
        _COMPUTING: "enforce_eager use_local_argmax_reduction",
        _COUNTED: "draft_load_config draft_parallel_config draft_tensor_parallel_size model target_model_config "
        "target_parallel_config tensor_parallel_size",
        _PLACE: "revision",
        _SAMPLING: "disable_lookahead_block_hashes draft_sample_method dspark_draft_topk enable_adaptive_verification "
        "fly_entropy_threshold fly_entropy_top_k fly_window_size prompt_lookup_max prompt_lookup_min "
        "rejection_sample_method suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth "
        "suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates xpress_topc",
        _SCHEDULE: "max_model_len",
    },
    "LoRAConfig": {
        _CAPACITY: "max_cpu_loras max_lora_rank max_loras specialize_active_lora",
        _COMPUTING: "fully_sharded_loras",
    },
    "KernelConfig": {
        _COMPUTING: "enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup "
        "enable_rocm_segmented_attn_autotune ir_op_priority",
    },
    "EngramConfig": {_CAPACITY: "cpu_offload dp_shared_memory embedding_across_dp use_thp"},
    "HiSparseConfig": {_CAPACITY: "device_buffer_size eager_host_mirror"},
    "KVTransferConfig": {
        _ENGINE: "engine_id kv_ip kv_parallel_size kv_port kv_rank kv_role",
        _SCHEDULE: "kv_buffer_device kv_buffer_size kv_connector kv_connector_extra_config kv_connector_module_path "
        "kv_load_failure_policy",
    },
}

_VARIABLES: Final[dict[str, str]] = {
    _BUILD: """
        VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_DOCKER_BUILD_CONTEXT VLLM_HAS_FLASHINFER_CUBIN
        VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX
        VLLM_TARGET_DEVICE VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
    """,
    _CAPACITY: """
        VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU
        VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
        VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MEDIA_CACHE_MAX_SIZE_MB
        VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
        VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MQ_MAX_CHUNK_BYTES_MB
        VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_MAX_PEERS
        VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_TRITON_JIT_WARMUP_NUM_THREADS
        VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
        VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_XGRAMMAR_CACHE_MB
    """,
    _COMPUTING: """
        VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM
        VLLM_BATCH_INVARIANT VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_COMPILE_CACHE_SAVE_FORMAT
        VLLM_CPU_ATTN_SPLIT_KV VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE VLLM_DEEP_GEMM_WARMUP
        VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_PYNCCL VLLM_DISABLE_SHARED_EXPERTS_STREAM
        VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING
        VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_PREGRAD_PASSES VLLM_ENABLE_STARTUP_PLAN
        VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_FORCE_AOT_LOAD
        VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM
        VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
        VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK
        VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_NCCL_SYMM_MEM VLLM_USE_STANDALONE_COMPILE
    """,
    _COUNTED: "VLLM_KV_CACHE_LAYOUT VLLM_USE_V2_MODEL_RUNNER",
    _ENGINE: """
        VLLM_API_KEY VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK
        VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_HOST_IP
        VLLM_LOOPBACK_IP VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
        VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PORT VLLM_PROCESS_NAME_PREFIX
    """,
    _OUTPUT: """
        VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING
        VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS
        VLLM_DEBUG_WORKSPACE VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG
        VLLM_GPU_SYNC_CHECK VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_LOGGING_COLOR
        VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM
        VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_MOONCAKE_STORE_TIER_LOG
        VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG VLLM_RAISE_ON_LOGIT_NANS
        VLLM_REQUEST_BODY_LOG_LEVEL VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE
        VLLM_USAGE_STATS_SERVER VLLM_XLA_CHECK_RECOMPILATION
    """,
    _PLACE: """
        VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CACHE_ROOT
        VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_DEBUG_DUMP_PATH
        VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
        VLLM_MEDIA_CACHE VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MODEL_REDIRECT_PATH
        VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH
        VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_TUNED_CONFIG_FOLDER VLLM_USE_MODELSCOPE VLLM_XLA_CACHE_PATH
    """,
    _PROCESSES: """
        VLLM_CPU_CI_ENV VLLM_CPU_OMP_THREADS_BIND VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
        VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_ENABLE_V1_MULTIPROCESSING VLLM_GPU_NIC_PCIE_MAPPING
        VLLM_NIC_SELECTION_VARS VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
        VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
        VLLM_RAY_PER_WORKER_GPUS VLLM_SERVER_DEV_MODE VLLM_SKIP_P2P_CHECK VLLM_TPU_USING_PATHWAYS
        VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
        VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND
        VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT VLLM_WORKER_MULTIPROC_METHOD
    """,
    _SAMPLING: """
        VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_CHAT_TEMPLATE_FUEL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
        VLLM_ENABLE_COHERE_API VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING
        VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS
        VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_SYSTEM_START_DATE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS
        VLLM_USE_FLASHINFER_SAMPLER VLLM_V1_USE_OUTLINES_CACHE VLLM_XPU_USE_SAMPLER_KERNEL
    """,
    _SCHEDULE: """
        VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_ALLOW_LONG_MAX_MODEL_LEN
        VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_AUDIO_FETCH_TIMEOUT VLLM_ENGINE_ITERATION_TIMEOUT_S
        VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HTTP_MAX_REQUEST_BODY_SIZE
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
        VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB
        VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_P2P_HANDSHAKE_TIMEOUT_S
        VLLM_P2P_IDLE_TIMEOUT_S VLLM_VIDEO_FETCH_TIMEOUT VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_XPU_PP_MICROBATCH
    """,
}


def _reasons(by_reason: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in by_reason.items() for name in names.split()}


FIELDS: Final = {cls: _reasons(by_reason) for cls, by_reason in _FIELDS.items()}
"""The reason of each irrelevant field, by the name of its class of vLLM's configuration."""

VARIABLES: Final = _reasons(_VARIABLES)
"""The reason of each irrelevant variable of the environment."""
