"""Probes and the scrape, over real sockets."""

import asyncio
import socket

import pytest

from worker.errors import StartError
from worker.health import HealthServer, Probes
from worker.metrics import Metrics


async def _get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]), answer.split("\r\n\r\n", 1)[1]


async def test_a_worker_that_is_not_ready_says_why_and_is_still_alive() -> None:
    """503 with the reason on /ready and /health, 200 on /live."""
    async with HealthServer(Probes(Metrics(), ready=lambda: "loading", live=lambda: None)) as server:
        assert await _get(server.port, "/live") == (200, '{"status": "ok"}')
        for path in ("/ready", "/health"):
            status, body = await _get(server.port, path)
            assert status == 503
            assert "loading" in body


async def test_metrics_have_a_port_of_their_own() -> None:
    """Only /metrics is served there, and only GET is taken."""
    async with HealthServer(Probes(Metrics(), ready=lambda: None, live=lambda: None)) as server:
        status, body = await _get(server.metrics_port, "/metrics")
        assert status == 200
        assert "v4flash_records_polled_total" in body
        assert (await _get(server.metrics_port, "/ready"))[0] == 404
        assert (await _get(server.port, "/metrics"))[0] == 404
        assert (await _get(server.port, "/ready", "POST"))[0] == 405


async def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    """A second worker on one machine is told what to change, and keeps no port itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HealthServer(Probes(Metrics(), ready=lambda: None, live=lambda: None), metrics_port=port)
        with pytest.raises(StartError, match=f"127.0.0.1:{port} .*: give another metrics_port, or 0"):
            await server.__aenter__()
    assert server.port == 0


async def test_health_says_what_computes() -> None:
    """An operator sees there whether the compiled operations serve, or why they do not."""
    details = {"kernels": "cpu-torch: no C++ compiler"}
    async with HealthServer(
        Probes(Metrics(), ready=lambda: None, live=lambda: None, details=lambda: details)
    ) as server:
        assert await _get(server.port, "/health") == (200, '{"status": "ok", "kernels": "cpu-torch: no C++ compiler"}')
        assert await _get(server.port, "/ready") == (200, '{"status": "ok"}')
