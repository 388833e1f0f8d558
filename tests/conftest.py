"""Fixtures for every suite: one real Kafka for the whole session, where there is Java and Maven."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Compiled once for a given source, into the tree's own cache and not into the home of whoever runs the tests.
os.environ.setdefault("V4FLASH_KERNEL_CACHE", str(Path(__file__).parents[1] / ".cache" / "kernels"))

sys.path.append(str(Path(__file__).parents[1] / "ops" / "kafka"))  # a folder of scripts, no package

from broker import KafkaServer, missing_tools


@pytest.fixture(scope="session")
def kafka_tools() -> None:
    """Skips without Java or Maven unless REQUIRE_KAFKA=1."""
    if missing := missing_tools():
        reason = f"Kafka needs {' and '.join(missing)}, not found on this machine"
        if os.environ.get("REQUIRE_KAFKA") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def kafka(kafka_tools: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A fresh Kafka."""
    with KafkaServer(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture(scope="session")
def kafka_bootstrap(kafka: KafkaServer) -> str:
    """Its bootstrap servers."""
    return str(kafka.bootstrap_servers)
