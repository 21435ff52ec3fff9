"""Goals that tests of the suite try in full size, by the arguments of pytest; docs/reliability.md has their methods."""

from __future__ import annotations

import shlex
import sys
from typing import Final

from tests.campaign.program import run_tests

GOALS: Final[dict[str, str]] = {
    "R4": (
        "tests/redis/test_cancellation.py tests/s3/test_operations.py::test_many_cancelled tests/disk/test_buffers.py"
    ),
    "R5": "tests/test_namespace.py tests/vllm/test_namespace.py",
    "R6": "tests/disk/test_kills.py tests/disk/test_killed_owners.py tests/disk/test_io_process.py",
    "R8": "tests/disk/test_errors.py",
    "R9": "tests/disk/test_capacity.py tests/disk/test_full_disk.py tests/disk/test_room.py",
    "R10": (
        "tests/disk/test_errors.py tests/disk/test_write_order.py tests/disk/test_dead.py -k"
        " 'write or written or fails or order or say or forgets'"
    ),
    "R12": (
        "tests/disk/test_frozen.py tests/disk/test_errors.py::test_the_loop_goes_on_while_the_disk_stalls"
        " tests/s3/test_faults.py::test_jobs_end_at_their_deadline tests/runtime/test_process.py"
    ),
    "R13": (
        "tests/contract/test_memory_tier.py tests/contract/test_process_host.py tests/disk/test_tier.py"
        " tests/s3/test_faults.py::test_jobs_end_at_their_deadline"
    ),
    "R14": "tests/runtime/test_breaker.py tests/s3/test_faults.py::test_breaker tests/tiers/test_async_tier.py",
    "R15": (
        "tests/redis/test_hostile.py tests/s3/test_client.py tests/runtime/test_limits.py -k"
        " 'retries or attempt or budget'"
    ),
    "R16": (
        "tests/s3/test_faults.py tests/redis/test_hostile.py tests/redis/test_operations.py::test_bad_network"
        " tests/peer/test_faults.py tests/peer/test_fault_requests.py"
        " tests/peer/test_relay.py tests/peer/test_middle.py"
    ),
    "R17": "tests/redis/test_operations.py tests/redis/test_topology.py tests/s3/test_contract.py",
    "R18": (
        "tests/disk/test_dead.py tests/disk/test_frozen.py tests/runtime/test_process.py"
        " tests/runtime/test_host.py tests/contract/test_memory_tier.py -k close"
    ),
    "R21": (
        "tests/test_config.py tests/test_registry.py tests/test_quantity.py tests/codec/test_hostile.py"
        " tests/redis/test_hostile.py tests/redis/test_resp.py tests/s3/test_http.py tests/s3/test_texts.py"
        " tests/peer/test_protocol.py tests/peer/test_config.py"
    ),
    "R23": "tests/disk/test_recovery.py tests/disk/test_open.py tests/disk/test_impostors.py",
    "R24": "tests/seal/test_forgeries.py",
    "R25": (
        "tests/codec/test_hostile.py tests/codec/test_contract.py tests/redis/test_hostile.py"
        " tests/redis/test_resp.py tests/s3/test_http.py tests/disk/test_recovery.py -k"
        " 'bomb or gibibyte or endless or bounded or tiny_chunks or broken_answers or planted_table'"
    ),
    "R26": "tests/s3/test_secrets.py tests/test_secret.py tests/redis/test_config.py tests/peer/test_config.py",
    "R27": "tests/disk/test_recovery.py tests/disk/test_open.py -k 'modes or umask or everybody'",
    "R28": "tests/project/test_code_rules.py",
    "R29": "tests/tiering/test_model.py tests/tiering/test_walk.py tests/tiers/test_event_model.py",
}

if __name__ == "__main__":
    run_tests(*shlex.split(GOALS[sys.argv[1]]))
