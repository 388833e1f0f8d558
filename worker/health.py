"""HTTP for probes and Prometheus: /health, /ready and /live on one port, /metrics on another. GET only, stdlib only."""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Self

from worker.errors import StartError
from worker.metrics import Metrics

MAX_HEAD_BYTES = 8192
HEAD_TIMEOUT_SECONDS = 5.0
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Probe = Callable[[], str | None]
"""None when all is well, else the reason why not."""

Answer = tuple[HTTPStatus, str, bytes]


class HealthServer:
    """Serves from `async with` until its end. `/live` fails when the process should be restarted, `/ready` when it
    takes no work, `/health` when either does; a failing probe answers 503 with the reason. `/health` adds details."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        ready: Probe,
        live: Probe,
        details: Callable[[], dict[str, str]] = dict,
        host: str = "127.0.0.1",
        port: int = 0,
        metrics_port: int = 0,
    ) -> None:
        self._probes: dict[str, Probe] = {"/live": live, "/ready": ready, "/health": lambda: live() or ready()}
        self._details = details
        self._metrics = metrics
        self._host = host
        self._wanted = {"port": port, "metrics_port": metrics_port}
        self._servers: list[asyncio.Server] = []
        self.port = port
        self.metrics_port = metrics_port

    async def __aenter__(self) -> Self:
        try:
            for setting, answer in (("port", self._probe), ("metrics_port", self._scrape)):
                self._servers.append(await self._listen(self._wanted[setting], answer))
        except OSError as error:
            await self.close()
            why = os.strerror(error.errno) if error.errno else str(error)
            where = f"{self._host}:{self._wanted[setting]}"
            raise StartError(
                f"cannot listen on {where} ({why}): give another {setting}, or 0 for a free one"
            ) from error
        self.port, self.metrics_port = (server.sockets[0].getsockname()[1] for server in self._servers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening; idempotent."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def _listen(self, port: int, answer: Callable[[str], Answer]) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(_request(head, answer)))
                    await writer.drain()
            writer.close()

        return await asyncio.start_server(serve, self._host, port, limit=MAX_HEAD_BYTES)

    def _probe(self, path: str) -> Answer:
        probe = self._probes.get(path)
        if probe is None:
            return HTTPStatus.NOT_FOUND, "text/plain", b"not found\n"
        reason = probe()
        body = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
        if path == "/health":
            body |= self._details()
        status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", json.dumps(body).encode()

    def _scrape(self, path: str) -> Answer:
        if path != "/metrics":
            return HTTPStatus.NOT_FOUND, "text/plain", b"not found\n"
        return HTTPStatus.OK, METRICS_CONTENT_TYPE, self._metrics.exposition()


def _request(head: bytes, answer: Callable[[str], Answer]) -> Answer:
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3:
        return HTTPStatus.BAD_REQUEST, "text/plain", b"bad request\n"
    if words[0] != b"GET":
        return HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only\n"
    return answer(words[1].split(b"?", 1)[0].decode("latin-1"))


def _response(answer: Answer) -> bytes:
    status, content_type, body = answer
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
