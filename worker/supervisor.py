"""Keeps one serving process below it and replaces that without a gap. Holds the ports; knows no broker and no engine.

A restart, by SIGUSR2, age or memory growth:

1. a new child loads its model beside the old one, takes no memory for the KV cache yet, and says so;
2. the old child stops taking prompts, commits, leases what runs to itself, leaves the group, and names what runs;
3. the new child joins and leaves those prompts alone; the probes and metrics are now its;
4. the old child finishes them, each is told to the new one, and ends; what it has not told of is then free.

Where memory does not hold two models, or an SSD tier belongs to one process, the old child drains and ends first.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import structlog

from worker.child_process import ChildProcess, ChildState
from worker.client_lifecycle import unless
from worker.health import Answer, Endpoint, told
from worker.lease import Answered
from worker.memory import available_bytes, resident_bytes

LOOK_SECONDS = 5.0
SETTLE_SECONDS = 60.0
HAND_OVER_SECONDS = 30.0
AT_ONCE_SECONDS = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """How long a child may drain after a stop, and how long it may answer after it was replaced."""

    grace_seconds: float
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a child is replaced without being asked. Memory growth is counted from `SETTLE_SECONDS` after it began to
    serve: until then its caches fill. `one_at_a_time` says why two cannot run side by side; None where they can."""

    after_seconds: float | None = None
    memory_growth_bytes: int | None = None
    one_at_a_time: str | None = None


class Memory(Protocol):
    """Bytes that a process has, and that another may take."""

    def resident(self, pid: int) -> int: ...

    def available(self) -> int: ...


class SystemMemory:
    """Of this machine or container."""

    def resident(self, pid: int) -> int:
        return resident_bytes(pid)

    def available(self) -> int:
        return available_bytes()


class Supervisor:
    """`run` may be called once."""

    def __init__(
        self,
        spawn: Callable[[], Awaitable[ChildProcess]],
        stopping: StopPolicy,
        restarting: RestartPolicy,
        *,
        memory: Memory | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spawn = spawn
        self._stopping = stopping
        self._restarting = restarting
        self._memory = memory or SystemMemory()
        self._now = now
        self._children: set[ChildProcess] = set()
        self._current: ChildProcess | None = None
        self._drained_first: ChildProcess | None = None
        self._num_stops = 0
        self._stop, self._at_once = asyncio.Event(), asyncio.Event()
        self._wanted, self._ended = asyncio.Event(), asyncio.Event()
        self._exit_code = 0
        self._serving_since: float | None = None
        self._settled_bytes: int | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Of the children that run."""
        return frozenset(child.process.pid for child in self._children)

    async def answer(self, endpoint: Endpoint, path: str) -> Answer:
        """What the serving child answers."""
        return told("starting") if self._current is None else await self._current.ask(endpoint, path)

    def request_stop(self) -> None:
        """Drain; the second call ends everything at once."""
        self._num_stops += 1
        self._stop.set()
        if self._num_stops > 1:
            self._at_once.set()

    def request_restart(self) -> None:
        """Replace the child; nothing happens while that is under way."""
        self._wanted.set()

    async def run(self, first: ChildProcess) -> int:
        """Serve until a stop, or until the child that serves ends by itself; the exit code."""
        self._current = first
        try:
            async with asyncio.TaskGroup() as tasks:
                self._adopt(first, tasks)
                work = [tasks.create_task(task) for task in (self._restarts(tasks), self._watch(), self._stops())]
                await self._ended.wait()
                for task in work:
                    task.cancel()
        finally:
            for child in self._children:
                child.process.kill()
        return self._exit_code

    def look(self) -> None:
        """Ask for a restart if one is due by age or memory."""
        child, policy = self._current, self._restarting
        if child is None or self._serving_since is None:
            return
        age = self._now() - self._serving_since
        if policy.after_seconds is not None and age >= policy.after_seconds:
            log.info("restart by age", seconds=round(age))
            self.request_restart()
        if policy.memory_growth_bytes is not None and age >= SETTLE_SECONDS:
            resident = self._memory.resident(child.process.pid)
            if self._settled_bytes is None:
                self._settled_bytes = resident
            elif resident - self._settled_bytes >= policy.memory_growth_bytes:
                log.info("restart by memory growth", resident_bytes=resident, settled_bytes=self._settled_bytes)
                self.request_restart()

    def _adopt(self, child: ChildProcess, tasks: asyncio.TaskGroup) -> None:
        self._children.add(child)
        tasks.create_task(self._follow(child))
        if self._stop.is_set():
            child.stop()

    async def _follow(self, child: ChildProcess) -> None:
        exit_code = await child.follow()
        self._children.discard(child)
        if child is self._current and child is not self._drained_first:
            self._exit_code = exit_code
            self._stop.set()  # nothing else may outlive it
        if self._stop.is_set() and not self._children:
            self._ended.set()

    async def _restarts(self, tasks: asyncio.TaskGroup) -> None:
        assert self._current is not None
        if await self._current.until(ChildState.LOADED) is ChildState.LOADED:
            await self._enter(self._current, lambda: ())
        while True:
            await self._wanted.wait()
            await self._replace(self._current, tasks)
            self._wanted.clear()

    async def _replace(self, old: ChildProcess, tasks: asyncio.TaskGroup) -> None:
        needed, available = self._memory.resident(old.process.pid), self._memory.available()
        reason = self._restarting.one_at_a_time or ("no memory for two models" if needed > available else None)
        if reason is not None:
            log.warning("draining before the restart", reason=reason, needed_bytes=needed, available_bytes=available)
            await self._drain_then_start(old, tasks)
            return
        log.info("a new process loads beside the old one", old_pid=old.process.pid)
        try:
            new = await self._spawn()
        except OSError as error:
            log.warning("a new process could not be started, the old one goes on", error=str(error))
            return
        self._adopt(new, tasks)
        if await new.until(ChildState.LOADED) is not ChildState.LOADED:
            if not self._stop.is_set():
                log.error("the new process did not load, the old one goes on", exit_code=new.exit_code)
            return
        self._current = new
        old.hand_over(new)
        await self._within(HAND_OVER_SECONDS, old, ChildState.HANDED_OVER)
        tasks.create_task(self._within(self._stopping.lease_seconds + HAND_OVER_SECONDS, old, ChildState.ENDED))
        await self._enter(new, lambda: () if old.state is ChildState.ENDED else old.running)
        if new.state is ChildState.SERVING:
            log.info("the new process serves", pid=new.process.pid, left_to_old=len(old.running))

    async def _drain_then_start(self, old: ChildProcess, tasks: asyncio.TaskGroup) -> None:
        self._drained_first = old
        old.stop()
        await self._within(self._stopping.grace_seconds + HAND_OVER_SECONDS, old, ChildState.ENDED)
        if self._stop.is_set():
            return
        self._current = new = await self._spawn()
        self._adopt(new, tasks)
        if await new.until(ChildState.LOADED) is ChildState.LOADED:
            await self._enter(new, lambda: ())

    async def _enter(self, child: ChildProcess, elsewhere: Callable[[], "list[Answered] | tuple[()]"]) -> None:
        """Let a loaded child join, unless it has ended since. `elsewhere` is asked at that moment: what ends before it
        is told of otherwise."""
        if child.state is not ChildState.LOADED:
            return
        child.join(elsewhere())
        self._serving_since = self._settled_bytes = None
        if await child.until(ChildState.SERVING) is ChildState.SERVING:
            self._serving_since = self._now()

    async def _within(self, seconds: float, child: ChildProcess, state: ChildState) -> None:
        """The child comes so far in time, or is killed."""
        try:
            async with asyncio.timeout(seconds):
                await child.until(state)
        except TimeoutError:
            log.warning("a process is stuck and is killed", pid=child.process.pid, state=child.state)
            child.process.kill()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    async def _stops(self) -> None:
        """A grace, then a last word, then the end."""
        await self._stop.wait()
        for child in self._children:
            child.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stopping.grace_seconds):
                await unless(self._at_once, self._wait_ended())
        for child in self._children:
            child.stop(at_once=True)
        await asyncio.sleep(AT_ONCE_SECONDS)
        for child in self._children:
            log.warning("a process does not stop and is killed", pid=child.process.pid)
            child.process.kill()

    async def _wait_ended(self) -> None:
        await self._ended.wait()
