"""A real vLLM over S3: killed and restarted, and two engines that share computed blocks."""

from __future__ import annotations

import pytest

from tests.s3.clients import options_for
from tests.s3.servers import S3Server
from tests.vllm.engines import Engine, Start
from tests.vllm.shared_medium import check_restart_and_sharing

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_restart_and_sharing(start: Start, plain: Engine, weed_server: S3Server) -> None:
    """After SIGKILL the prompts' blocks are loaded from S3; then two engines use each other's blocks."""
    tier = {"type": "s3", **options_for(weed_server), "negative_ttl": "1ms"}
    check_restart_and_sharing(start, plain, tier)
