"""The rules for Prometheus and the board for Grafana ask only for what a worker tells."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.api import EngineStats, PriorityClass
from topics.errors import ErrorCode
from worker.broker.api import TopicPartition
from worker.metrics import Metrics
from worker.partition_backlog import PartitionBacklog

OPS = Path(__file__).parents[2] / "ops"


def told() -> dict[str, set[str]]:
    """Sample name -> label names of a worker that has seen everything once."""
    metrics = Metrics()
    metrics.request_finished(PriorityClass.URGENT, "done", 1.0, 0.1, 5, 5)
    metrics.error("internal_error")
    metrics.stream_timeout("engine")
    metrics.dead_letter()
    metrics.observe_engine(EngineStats())
    metrics.observe_backlog([PartitionBacklog(TopicPartition("t", 0), 1.0, 5, 10.0)])
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def alerts() -> list[dict]:
    (group,) = yaml.safe_load((OPS / "prometheus" / "alerts.yml").read_text())["groups"]
    return group["rules"]


def recorded() -> list[dict]:
    (group,) = yaml.safe_load((OPS / "prometheus" / "recording.yml").read_text())["groups"]
    return group["rules"]


def panels() -> list[dict]:
    return json.loads((OPS / "grafana" / "v4flash.json").read_text())["panels"]


EXPRESSIONS = {rule.get("alert") or rule["record"]: rule["expr"] for rule in [*alerts(), *recorded()]} | {
    f"{panel['title']} {target['refId']}": target["expr"] for panel in panels() for target in panel["targets"]
}


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
def test_an_expression_names_metrics_and_labels_that_exist(expression):
    """Every metric is one of the worker's, every label it is grouped or filtered by is on it, brackets are closed."""
    samples = told()
    names = re.findall(r"\bv4flash_\w+", expression)
    assert set(names) <= set(samples)
    labels = set().union(*(samples[name] for name in names)) | {"instance", "job", "le"}
    grouped = {label.strip() for by in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in by.split(",")}
    filtered = set(re.findall(r"[{,]\s*(\w+)\s*[=!]~?\"", expression))
    assert grouped | filtered <= labels
    for opened, closed in ("()", "[]", "{}"):
        assert expression.count(opened) == expression.count(closed)


def test_every_metric_is_on_the_board():
    """What a worker tells is seen somewhere."""
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in told()}
    assert {name for name in families if name not in shown} == set()


def test_every_error_code_of_an_alert_exists():
    """A code that nobody sends would never fire."""
    (errors,) = (rule["expr"] for rule in alerts() if rule["alert"] == "V4flashServerErrors")
    (codes,) = re.findall(r'code=~"([^"]+)"', errors)
    assert set(codes.split("|")) <= {str(code) for code in ErrorCode}


def test_every_alert_says_what_clients_notice_and_what_to_do():
    """An alert without an action is noise."""
    for rule in alerts():
        assert set(rule["annotations"]) == {"summary", "action", "runbook"}
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_scrape_configuration_loads_the_rules():
    """The files beside each other work together."""
    config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    assert all((OPS / "prometheus" / name).is_file() for name in config["rule_files"])
    assert [scrape["job_name"] for scrape in config["scrape_configs"]] == ["v4flash"]


def test_every_alert_has_its_section_in_the_runbook_and_every_section_its_alert():
    """Whoever is woken finds the page that belongs to what woke them."""
    page = "ops/runbooks/alerts.md"
    sections = re.findall(r"^## (\w+)$", (OPS.parent / page).read_text(), flags=re.MULTILINE)
    assert sections == [rule["alert"] for rule in alerts()]
    assert [rule["annotations"]["runbook"] for rule in alerts()] == [f"{page}#{name.lower()}" for name in sections]
