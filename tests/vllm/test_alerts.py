"""Prometheus alerts: generated from the list of metrics, accepted by promtool, fired by a fault, cleared by its end."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.scripts import load_script
from tests.project.tree import ROOT

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's prometheus)")


SCRIPT = load_script("make_alerts")


def promtool(*arguments: object) -> str:
    """Run promtool; return its output, which a failure shows."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_rules(directory: Path, series: dict[str, str], *expected: dict[str, Any]) -> None:
    """Evaluate the alerts once a minute over values of series, in promtool's notation."""
    given = [{"series": text, "values": values} for text, values in series.items()]
    case = {
        "rule_files": [str(SCRIPT.ALERTS_FILE)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": list(expected)}],
    }
    (directory / "case.yaml").write_text(yaml.safe_dump(case))
    promtool("test", "rules", directory / "case.yaml")


def test_the_committed_alerts_are_those_of_the_script() -> None:
    """The committed alerts equal the script's output; after a change, run scripts/make_alerts.py."""
    assert all(path.read_text() == text for path, text in SCRIPT.texts().items())
    assert len({alert.name for alert in SCRIPT.ALERTS}) == len(SCRIPT.ALERTS) > 8


def test_an_alert_on_an_unknown_metric_or_label_is_an_error() -> None:
    """Unknown metrics and labels are errors, so no alert outlives its metric."""
    with pytest.raises(KeyError):
        SCRIPT.series("no_such_metric")
    with pytest.raises(KeyError):
        SCRIPT.series("load_blocks", cause="=~'x'")


def test_compose_and_prometheus_use_the_alerts() -> None:
    """The deployment example includes the alerts."""
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus.yaml").read_text())
    assert prometheus["rule_files"] == ["alerts.yaml"]
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    assert "./alerts.yaml:/etc/prometheus/alerts.yaml:ro" in compose["services"]["prometheus"]["volumes"]


@needs_promtool
def test_promtool_accepts_the_alerts_and_the_configuration() -> None:
    """Their syntax is valid, although the configuration's files exist only in its container."""
    assert "SUCCESS" in promtool("check", "config", "--syntax-only", ROOT / "deploy/prometheus.yaml")
    assert f"{len(SCRIPT.ALERTS)} rules found" in promtool("check", "rules", SCRIPT.ALERTS_FILE)


@needs_promtool
@pytest.mark.parametrize("alert", SCRIPT.ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_at_its_fault_and_clears_after_it(alert: Any, tmp_path: Path) -> None:
    """Ten minutes without the fault, an hour with it, and an hour without it; no other alert fires."""

    def values(name: str, value: float | None) -> str:
        if value is None:
            return "1x9 _x60 1x60"
        if "_total" in name or "_bucket" in name:
            return f"0x9 0+{value}x60 {60 * value}x60"
        healthy = int(value == 0)
        return f"{healthy}x9 {value}x60 {healthy}x60"

    def firing(minute: int, count: int) -> dict[str, Any]:
        samples = [{"labels": f'{{alertname="KVStore{alert.name}"}}', "value": count}] if count else []
        return {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": samples,
        }

    series = {name.replace("'", '"'): values(name, value) for name, value in alert.faulty}
    if alert.name != "MetricsAbsent":
        series['vllm:kvstore_ready{tier="sound"}'] = "1x129"
    check_rules(tmp_path, series, firing(8, 0), firing(65, 1), firing(125, 0))


@needs_promtool
@pytest.mark.parametrize("metric", ["loaded_bytes", "repeated_requests"])
def test_stores_for_other_prompts_or_with_loads_are_read(metric: str, tmp_path: Path) -> None:
    """Stores cause no alert while anything is loaded, or while no prompt is computed again."""
    (alert,) = (each for each in SCRIPT.ALERTS if each.name == "NeverRead")
    series = {text.replace("'", '"'): f"0+{value}x120" for text, value in alert.faulty}
    changed = next(text for text in series if metric in text)
    series[changed] = "0+1x120" if metric == "loaded_bytes" else "0x120"
    series['vllm:kvstore_ready{tier="disk"}'] = "1x120"
    check_rules(tmp_path, series, {"expr": "count(ALERTS)", "eval_time": "90m", "exp_samples": []})


@needs_promtool
@pytest.mark.parametrize("minutes", [1, 3, 60])
def test_refusals_during_a_rotation_are_no_alert(minutes: int, tmp_path: Path) -> None:
    """Credentials refused for the minutes of a rotation cause no alert; those refused for an hour do."""
    (alert,) = (each for each in SCRIPT.ALERTS if each.name == "CredentialsRefused")
    series = {text.replace("'", '"'): f"0x9 0+1x{minutes} {minutes}x60" for text, _ in alert.faulty}
    series['vllm:kvstore_ready{tier="disk"}'] = "1x129"
    fired = 'count(max_over_time(ALERTS{alertstate="firing"}[1h]))'
    counts = [{"labels": "{}", "value": 1}] if minutes == 60 else []
    check_rules(tmp_path, series, {"expr": fired, "eval_time": "69m", "exp_samples": counts})


@needs_promtool
@pytest.mark.parametrize("name", ["LoadsFail", "StoresShed", "SlowLoads"])
def test_a_share_of_little_traffic_is_no_alert(name: str, tmp_path: Path) -> None:
    """The same fault at a hundredth of the traffic, some blocks an hour, fires nothing."""
    (alert,) = (each for each in SCRIPT.ALERTS if each.name == name)
    series = [(text.replace("'", '"'), f"0+{value / 100}x120") for text, value in alert.faulty]
    series += [('vllm:kvstore_ready{tier="disk"}', "1x120")]
    case = {
        "rule_files": [str(SCRIPT.ALERTS_FILE)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": text, "values": values} for text, values in series],
                "promql_expr_test": [{"expr": "count(ALERTS)", "eval_time": "60m", "exp_samples": []}],
            }
        ],
    }
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(case))
    promtool("test", "rules", tmp_path / "case.yaml")


def test_every_alert_has_a_heading_on_the_troubleshooting_page() -> None:
    """The runbook of each alert is a heading of the page that it names."""
    for rule in SCRIPT.rules()["groups"][0]["rules"]:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = [line[4:].lower() for line in (ROOT / page).read_text().splitlines() if line.startswith("### ")]
        assert headings.count(anchor) == 1, anchor
