"""Requests that run here now, so that a duplicate of one attaches to it instead of running again."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Hashable
from typing import NamedTuple

from engine.api import Delta


class RunKey(NamedTuple):
    """Who asks for what: two records with equal keys have equal answers. Never spans tenants."""

    tenant: str
    request_id: str
    operation: str
    digest: bytes

    @classmethod
    def of(cls, tenant: str, request_id: str, operation: str, value: bytes) -> "RunKey":
        return cls(tenant, request_id, operation, hashlib.sha256(value).digest())


class RunLost(Exception):  # noqa: N818  an outcome, not a fault
    """The run that was followed ended without a whole answer."""


class SharedRun:
    """One running request. `route` says where and how its answer goes: a duplicate with an equal one needs no reply."""

    def __init__(self, key: RunKey, route: Hashable) -> None:
        self.key = key
        self.route = route
        self._deltas: list[Delta] = []
        self._whole = False
        self._over: bool | None = None
        self._news = asyncio.Event()

    def add(self, delta: Delta) -> None:
        """Show a delta to all followers; the one with the usage is the last."""
        self._deltas.append(delta)
        self._whole = delta.usage is not None
        self._tell()

    def end(self, *, told: bool) -> None:
        """The record that runs is dealt with; `told` says that its client has an answer or an error."""
        self._over = told
        self._tell()

    async def follow(self) -> AsyncIterator[Delta]:
        """All deltas from the first one, as they come. Raises RunLost when the run ends before the last."""
        num_seen = 0
        while True:
            for delta in self._deltas[num_seen:]:
                num_seen += 1
                yield delta
            if num_seen < len(self._deltas):
                continue
            if self._whole:
                return
            if self._over is not None:
                raise RunLost
            await self._news.wait()

    async def told(self) -> bool:
        """Waits until the record that runs is dealt with; whether its client was told."""
        while self._over is None:
            await self._news.wait()
        return self._over

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class SharedRuns:
    """The runs of one worker."""

    def __init__(self) -> None:
        self._runs: dict[RunKey, SharedRun] = {}

    def lead(self, key: RunKey, route: Hashable) -> SharedRun | None:
        """A new run that the caller has to `end`; None when there is one to `follow`."""
        if key in self._runs:
            return None
        self._runs[key] = run = SharedRun(key, route)
        return run

    def running(self, key: RunKey) -> SharedRun:
        """Raises KeyError when nothing runs under this key."""
        return self._runs[key]

    def end(self, run: SharedRun, *, told: bool) -> None:
        if self._runs.get(run.key) is run:
            del self._runs[run.key]
        run.end(told=told)
