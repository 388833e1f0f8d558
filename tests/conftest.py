"""Fixtures for every suite: one real Kafka for the whole session, where there is Java and Maven."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


def _kafka_script() -> ModuleType:
    path = Path(__file__).parents[1] / "ops" / "kafka" / "broker.py"
    spec = importlib.util.spec_from_file_location("ops_kafka_broker", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap servers of a fresh Kafka; skips without Java or Maven unless REQUIRE_KAFKA=1."""
    script = _kafka_script()
    if missing := script.missing_tools():
        reason = f"Kafka needs {' and '.join(missing)}, not found on this machine"
        if os.environ.get("REQUIRE_KAFKA") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with script.KafkaServer(tmp_path_factory.mktemp("kafka")) as server:
        yield server.bootstrap_servers
