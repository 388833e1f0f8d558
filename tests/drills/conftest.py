"""One prefix and group for each drill on the session's Kafka, and the table at the end."""

import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # the harness is no package: nothing imports it

from broker import KafkaServer
from ledger import Ledger, Row
from proxy import KafkaProxy
from secured import SecuredKafka
from workers import Workers

from worker.provision import create_topics, topics_of

ROWS: list[Row] = []


@pytest.fixture
def prefix() -> str:
    """Of the topics and the group of this drill."""
    return f"d{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def ledger(kafka: KafkaServer, prefix: str) -> AsyncIterator[Ledger]:
    async with opened(kafka.bootstrap_servers, prefix) as ledger:
        yield ledger


@pytest.fixture
async def model_ledger(kafka: KafkaServer, prefix: str) -> AsyncIterator[Ledger]:
    """For workers on the real small model, whose answers are not known beforehand."""
    async with opened(kafka.bootstrap_servers, prefix, any_text=True, max_tokens=96) as ledger:
        yield ledger


@asynccontextmanager
async def opened(bootstrap_servers: str, prefix: str, **how: Any) -> AsyncIterator[Ledger]:
    """A ledger with its topics on this Kafka."""
    ledger = Ledger(bootstrap_servers, prefix, **how)
    await create_topics(ledger.broker.admin(), topics_of(ledger.names, max_body_bytes=4_000_000))
    await ledger.start()
    yield ledger
    await ledger.stop()


@pytest.fixture
async def secured(kafka_tools: None, tmp_path: Path, prefix: str) -> AsyncIterator[tuple[SecuredKafka, Ledger]]:
    """A Kafka that asks who is there, and a ledger that may do everything on it."""
    with SecuredKafka(tmp_path / "secured") as server:
        async with opened(server.bootstrap_servers, prefix) as ledger:
            yield server, ledger


@pytest.fixture
def workers(prefix: str, tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(prefix, tmp_path)
    yield workers
    workers.stop()


@pytest.fixture
async def proxy(kafka: KafkaServer) -> AsyncIterator[KafkaProxy]:
    async with KafkaProxy(kafka.proxy_port, "127.0.0.1", kafka.port_behind_proxy) as proxy:
        yield proxy


@pytest.fixture
def passed(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Ends a drill: nothing lost, every answer right, no more duplicates than the fault allows; adds its line."""

    def check(fault: str, *, max_duplicates: int = 0, ledger: Ledger | None = None) -> None:
        row = (ledger or request.getfixturevalue("ledger")).row(fault)
        ROWS.append(row)
        assert row.num_lost == 0, row
        assert row.num_right == row.num_sent, row
        assert row.num_duplicates <= max_duplicates, row

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    write = terminalreporter.write_line
    terminalreporter.section("drills")
    write(f"{'fault':<60} {'sent':>5} {'right':>6} {'dupl.':>6} {'lost':>5} {'recovered':>10}")
    for row in ROWS:
        write(
            f"{row.fault:<60} {row.num_sent:>5} {row.num_right:>6} {row.num_duplicates:>6} {row.num_lost:>5} "
            f"{row.recovery_seconds:>8.1f} s"
        )
