"""HTTP for probes and Prometheus: /health, /ready and /live on one port, /metrics on another. GET only, stdlib only."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from http import HTTPStatus
from types import TracebackType
from typing import NamedTuple, Self

from worker.errors import StartError
from worker.metrics import Metrics

MAX_HEAD_BYTES = 8192
HEAD_TIMEOUT_SECONDS = 5.0
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Probe = Callable[[], str | None]
"""None when all is well, else the reason why not."""


class Endpoint(StrEnum):
    """What a port serves; the values are the settings that name it."""

    PROBES = "port"
    METRICS = "metrics_port"


class Answer(NamedTuple):
    """A response without its head."""

    status: HTTPStatus
    content_type: str
    body: bytes


Answering = Callable[[Endpoint, str], Awaitable[Answer]]
"""Answers a GET of a path."""


class Probes:
    """What a worker answers. `/live` fails when the process should be restarted, `/ready` when it takes no work,
    `/health` when either does; a failing probe answers 503 with the reason. `/health` adds details."""

    def __init__(
        self, metrics: Metrics, *, ready: Probe, live: Probe, details: Callable[[], dict[str, str]] = dict
    ) -> None:
        self._probes: dict[str, Probe] = {"/live": live, "/ready": ready, "/health": lambda: live() or ready()}
        self._details = details
        self._metrics = metrics

    async def __call__(self, endpoint: Endpoint, path: str) -> Answer:
        return self._scrape(path) if endpoint is Endpoint.METRICS else self._probe(path)

    def _probe(self, path: str) -> Answer:
        probe = self._probes.get(path)
        if probe is None:
            return NOT_FOUND
        reason = probe()
        return told(reason, self._details() if path == "/health" else {})

    def _scrape(self, path: str) -> Answer:
        if path != "/metrics":
            return NOT_FOUND
        return Answer(HTTPStatus.OK, METRICS_CONTENT_TYPE, self._metrics.exposition())


NOT_FOUND = Answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")


def told(reason: str | None, details: dict[str, str] | None = None) -> Answer:
    """A probe's answer: None is well."""
    body = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
    status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
    return Answer(status, "application/json", json.dumps(body | (details or {})).encode())


class HealthServer:
    """Serves what `answering` says, from `async with` until its end. Raises StartError for a port that is taken."""

    def __init__(self, answering: Answering, *, host: str = "127.0.0.1", port: int = 0, metrics_port: int = 0) -> None:
        self._answering = answering
        self._host = host
        self._wanted = {Endpoint.PROBES: port, Endpoint.METRICS: metrics_port}
        self._servers: list[asyncio.Server] = []
        self.port = port
        self.metrics_port = metrics_port

    async def __aenter__(self) -> Self:
        try:
            for endpoint, port in self._wanted.items():
                self._servers.append(await self._listen(endpoint, port))
        except OSError as error:
            await self.close()
            why = os.strerror(error.errno) if error.errno else str(error)
            raise StartError(
                f"cannot listen on {self._host}:{port} ({why}): give another {endpoint}, or 0 for a free one"
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

    async def _listen(self, endpoint: Endpoint, port: int) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(await self._request(endpoint, head)))
                    await writer.drain()
            writer.close()

        return await asyncio.start_server(serve, self._host, port, limit=MAX_HEAD_BYTES)

    async def _request(self, endpoint: Endpoint, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3:
            return Answer(HTTPStatus.BAD_REQUEST, "text/plain", b"bad request\n")
        if words[0] != b"GET":
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only\n")
        return await self._answering(endpoint, words[1].split(b"?", 1)[0].decode("latin-1"))


def _response(answer: Answer) -> bytes:
    status, content_type, body = answer
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
