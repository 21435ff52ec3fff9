"""The Grafana dashboard: generated from the list of metrics; Prometheus answers each of its queries about an engine."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.serving import free_port
from kvstore.cli.top import METRICS
from kvstore.testing import eventually
from tests.project.scripts import load_script
from tests.vllm.engines import BLOCK_TOKENS, Start

SCRIPT = load_script("make_dashboard")
QUERIES = [
    (panel["title"], target["expr"])
    for panel in SCRIPT.dashboard()["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
_INTERVAL_S = 15
"""Time between two scrapes."""


def test_the_committed_dashboard_is_that_of_the_script() -> None:
    """The committed dashboard equals the script's output; after a change, run scripts/make_dashboard.py."""
    assert SCRIPT.DASHBOARD_FILE.read_text() == SCRIPT.text()


def test_every_metric_is_on_the_dashboard() -> None:
    """Every metric is on the dashboard, even one without its own panel."""
    asked = " ".join(query for _, query in QUERIES)
    promql = load_script("promql")
    missing = [name for name in SCRIPT.DECLARED if promql.series(name.removeprefix("vllm:kvstore_")) not in asked]
    assert not missing
    assert len(SCRIPT.rows()["All other metrics"]) > 3


def test_a_panel_of_an_unknown_metric_or_label_is_an_error() -> None:
    """Unknown metrics and labels are errors, so no panel outlives its metric."""
    for wrong in (lambda: SCRIPT.total("nothing", "tier"), lambda: SCRIPT.rate("load_blocks", "cause")):
        with pytest.raises(KeyError):
            wrong()


@pytest.fixture(scope="module")
def scrapes(start: Start, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """/metrics of a real engine before, while and after it has stored and loaded blocks."""
    disk = {"type": "file", "path": str(tmp_path_factory.mktemp("kv")), "capacity": "1GiB", "codec": "byteplane+zstd:1"}
    engine = start(
        offloading={
            "spec_name": "KVStoreOffloadingSpec",
            "spec_module_path": "kvstore.vllm",
            "cpu_bytes_to_use": 1 << 26,
            "secondary_tiers": [disk],
            "tiering": {"tenants": {"by": "cache_salt"}},
        }
    )
    rng = random.Random(7)
    prompt = [rng.randrange(2, 500) for _ in range(8 * BLOCK_TOKENS)]

    def page() -> str:
        """Return a scrape in which a tier has reported all of its statistics; vLLM fetches them in its steps."""
        found = ""

        def is_complete() -> bool:
            nonlocal found
            engine.ask(prompt)
            engine.call("settle")
            found = engine.call("scrape")
            engine.call("forget_device")
            return "vllm:kvstore_codec_gauge{" in found

        eventually(is_complete, timeout_s=120, what="statistics of the codec")
        return found

    return [page() for _ in range(3)]


@pytest.mark.engine
def test_metrics_of_top_exist(scrapes: list[str]) -> None:
    """An engine has every metric that kvstore top shows."""
    names = {line.split("{")[0].removeprefix("vllm:kvstore_") for line in scrapes[0].splitlines()}
    assert not METRICS - names


@pytest.fixture(scope="module")
def prometheus(scrapes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float]]:
    """A Prometheus with these scrapes; its URL, and the time of the last one."""
    if shutil.which("prometheus") is None:
        pytest.skip("needs Prometheus (Debian's prometheus)")
    work = tmp_path_factory.mktemp("prometheus")
    first = time.time() - 600
    lines = []
    for number, page in enumerate(scrapes):
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {**sample.labels, "instance": "engine:8000", "job": "vllm"}
                chosen = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
                lines.append(f"{sample.name}{{{chosen}}} {sample.value} {first + number * _INTERVAL_S:.3f}")
    (work / "scrapes").write_text("\n".join([*lines, "# EOF\n"]))
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", work / "scrapes", work / "data"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (work / "prometheus.yaml").write_text("scrape_configs: []\n")
    port = free_port()
    with (work / "log").open("w") as log:
        server = subprocess.Popen(
            ["prometheus", f"--config.file={work}/prometheus.yaml", f"--storage.tsdb.path={work}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _wait_ready(port, server, work / "log")
        yield f"http://127.0.0.1:{port}", first + (len(scrapes) - 1) * _INTERVAL_S
    finally:
        server.kill()
        server.wait()


@pytest.mark.engine
@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_has_an_answer(prometheus: tuple[str, float], title: str, query: str) -> None:
    """No panel is empty for a working engine."""
    url, now = prometheus
    answer = _ask(url, query.replace("$__rate_interval", "1m").replace("$instance", ".*"), now)
    assert answer["status"] == "success", answer
    assert answer["data"]["result"], f"{title}: nothing for {query}"


def _ask(url: str, query: str, now: float) -> dict[str, Any]:
    with urlopen(f"{url}/api/v1/query?{urlencode({'query': query, 'time': f'{now:.3f}'})}", timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _wait_ready(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
                return
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
