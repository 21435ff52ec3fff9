"""A real vLLM over Redis: killed and restarted, and two engines that share computed blocks."""

from __future__ import annotations

import pytest

from tests.redis.clients import options_for
from tests.redis.servers import Server
from tests.vllm.engines import Engine, Start
from tests.vllm.shared_medium import check_restart_and_sharing

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_restart_and_sharing(start: Start, plain: Engine, redis_server: Server) -> None:
    """After SIGKILL the prompts' blocks are loaded from Redis; then two engines use each other's blocks."""
    tier = {"type": "redis", **options_for(redis_server), "negative_ttl": "1ms"}
    check_restart_and_sharing(start, plain, tier)
