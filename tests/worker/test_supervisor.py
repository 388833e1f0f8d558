"""Replacing the process that serves: two workers on one broker, one supervisor, and lines of real sockets between."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

from engine.errors import ModelLoadError
from engine.scripted import ScriptedEngine
from worker.broker.api import BrokerUnavailableError, TopicPartition
from worker.child import Child
from worker.child_process import ChildProcess, ChildState
from worker.health import Endpoint, Probes
from worker.lease import Answered
from worker.link import Kind, Link, as_fields
from worker.metrics import Metrics
from worker.supervisor import SETTLE_SECONDS, RestartPolicy, StopPolicy, Supervisor


class TaskProcess:
    """A worker in a task, with what a process has."""

    def __init__(self, pid: int, app) -> None:
        self.pid = pid
        self.app = app
        self.killed = False
        self._task: asyncio.Task | None = None

    def begin(self, link: Link) -> None:
        self._task = asyncio.create_task(self._run(link))

    async def _run(self, link: Link) -> None:
        probes = Probes(Metrics(), ready=lambda: None if self.app.ready else "not ready", live=lambda: None)
        child = Child(link, self.app, probes, orphaned=lambda: None)
        following = asyncio.create_task(child.run())
        try:
            await self.app.run(handover=child)
        finally:
            following.cancel()
            link.close()

    async def wait(self) -> int:
        assert self._task is not None
        await asyncio.wait({self._task})
        if self._task.cancelled():
            return -9
        return 1 if self._task.exception() else 0

    def kill(self) -> None:
        if self._task is not None and not self._task.done():
            self.killed = True
            self._task.cancel()


class Memory:
    """As much as a test says."""

    def __init__(self) -> None:
        self.taken, self.free = 100, 1000

    def resident(self, pid: int) -> int:
        return self.taken

    def available(self) -> int:
        return self.free


class House:
    """A supervisor whose children are workers of the rig; `engines` are those of the next ones."""

    def __init__(self, rig) -> None:
        self.rig = rig
        self.engines: list[ScriptedEngine] = []
        self.changes: dict[str, object] = {}
        self.memory = Memory()
        self.time = 0.0
        self.processes: list[TaskProcess] = []
        self.children: list[ChildProcess] = []
        self.spawned = asyncio.Condition()
        self.supervisor = Supervisor(
            self.spawn,
            StopPolicy(grace_seconds=5.0, lease_seconds=60.0),
            RestartPolicy(after_seconds=3600.0, memory_growth_bytes=50),
            memory=self.memory,
            now=lambda: self.time,
        )

    async def spawn(self) -> ChildProcess:
        engine = self.engines.pop(0) if self.engines else ScriptedEngine()
        ours, theirs = socket.socketpair()
        process = TaskProcess(len(self.processes) + 1, self.rig.app(engine, **self.changes))
        process.begin(await Link.over(theirs))
        child = ChildProcess(process, await Link.over(ours))
        async with self.spawned:
            self.processes.append(process)
            self.children.append(child)
            self.spawned.notify_all()
        return child

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.supervisor.run(await self.spawn()))
        try:
            async with asyncio.timeout(20):
                yield task
        finally:
            self.supervisor.request_stop()
            with suppress(asyncio.CancelledError):
                await task

    async def until(self, pid: int, state: ChildState) -> ChildProcess:
        """The child with this number, counted from 1, has been started and has come so far."""
        async with asyncio.timeout(10):
            async with self.spawned:
                await self.spawned.wait_for(lambda: len(self.children) >= pid)
            child = self.children[pid - 1]
            assert await child.until(state) is state, child
        return child

    async def until_serving(self, pid: int) -> ChildProcess:
        return await self.until(pid, ChildState.SERVING)


async def until_final(rig, request_id: str) -> None:
    """Its terminal record is there."""
    reader = rig.broker.reader([rig.names.replies], from_beginning=True)
    await reader.start()
    async with asyncio.timeout(10):
        while not any("x-final" in reply.headers for reply in rig.replies(request_id)):
            await reader.poll(100, 1.0)
    await reader.stop()


@pytest.fixture
def house(rig) -> House:
    return House(rig)


async def send(rig, ids: list[str], text: str) -> None:
    for index, request_id in enumerate(ids):
        body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True}).encode()
        headers = (("x-request-id", request_id.encode()),)
        await rig.producer.send("v4flash.prompts.standard", body, headers=headers, partition=index % 2)


async def test_a_restart_under_load_loses_nothing_and_says_nothing_twice(rig, house):
    """Streams of the old process go on in it, prompts after it are the new one's, each has one attempt."""
    house.engines = [ScriptedEngine(tokens_per_second=100), ScriptedEngine()]
    before, after = [f"r{i}" for i in range(12)], [f"s{i}" for i in range(12)]
    async with house.running() as task:
        await house.until_serving(1)
        await send(rig, before, "[[tokens=60]]")
        for request_id in before:
            await rig.until_replied(request_id)
        house.supervisor.request_restart()
        new = await house.until_serving(2)
        await send(rig, after, "short [[tokens=5]]")
        for request_id in after:
            await rig.until_replied(request_id)
        assert (await new.ask(Endpoint.PROBES, "/ready")).status == 200
        await house.until(1, ChildState.ENDED)
        assert all(rig.answer(request_id) for request_id in before + after)
    assert await task == 0
    attempts = {id_: {reply.headers["x-attempt"] for reply in rig.replies(id_)} for id_ in before + after}
    assert {len(found) for found in attempts.values()} == {1}
    assert house.processes[0].app.member.tracker.num_running == 0
    assert await rig.uncommitted() == {}


async def test_what_runs_is_left_alone_also_where_the_commit_did_not_arrive(rig, house):
    """No lease is in the broker: the new process knows by the line what the old one is answering."""
    house.engines = [ScriptedEngine(tokens_per_second=100), ScriptedEngine()]
    ids = [f"r{i}" for i in range(4)]
    async with house.running():
        await house.until_serving(1)
        await send(rig, ids, "[[tokens=60]]")
        for request_id in ids:
            await rig.until_replied(request_id)
        rig.broker.fail_next("commit", BrokerUnavailableError("away"), 2)
        house.supervisor.request_restart()
        await house.until_serving(2)
        await house.until(1, ChildState.ENDED)
        assert all(len(rig.answer(request_id)) == 60 for request_id in ids)
    assert {len({r.headers["x-attempt"] for r in rig.replies(request_id)}) for request_id in ids} == {1}
    assert await rig.uncommitted() == {}


async def test_a_process_that_dies_while_it_finishes_frees_its_prompts_at_once(rig, house):
    """Nobody waits for its leases to run out: the new process answers."""
    house.engines = [ScriptedEngine(tokens_per_second=1), ScriptedEngine()]
    async with house.running():
        await house.until_serving(1)
        await send(rig, ["r"], "[[tokens=60]]")
        await rig.until_replied("r")
        house.supervisor.request_restart()
        await house.until_serving(2)
        house.processes[0].kill()
        await until_final(rig, "r")
        assert len(rig.answer("r")) == 60


async def test_a_new_process_that_cannot_load_changes_nothing(rig, house):
    """The old one goes on, and a later restart is tried again."""

    class Broken(ScriptedEngine):
        async def start(self) -> None:
            raise ModelLoadError("the file is gone")

    house.engines = [ScriptedEngine(), Broken()]
    async with house.running() as task:
        old = await house.until_serving(1)
        house.supervisor.request_restart()
        await house.until(2, ChildState.ENDED)
        assert old.state is ChildState.SERVING
        await rig.send({"messages": [{"role": "user", "content": "x"}]}, x_request_id="r")
        await rig.until_replied("r")
        house.supervisor.request_restart()
        await house.until_serving(3)
    assert await task == 0


async def test_a_new_process_that_ends_before_it_joins_costs_no_answer_of_the_old_one(rig, house):
    """It had loaded, and the old one was leaving the group: that drains and ends by itself, and so does the worker."""
    house.engines = [ScriptedEngine(tokens_per_second=100), ScriptedEngine()]
    async with house.running() as task:
        await house.until_serving(1)
        await send(rig, ["r"], "[[tokens=60]]")
        await rig.until_replied("r")
        old, told = house.processes[0], asyncio.Event()
        hand_over, old.app.request_hand_over = old.app.request_hand_over, told.set
        house.supervisor.request_restart()
        await told.wait()
        house.processes[1].kill()
        await house.until(2, ChildState.ENDED)
        hand_over()
        assert await task == 137
    assert not old.killed
    assert len(rig.answer("r")) == 60


async def test_a_new_process_that_cannot_be_started_changes_nothing(rig, house):
    """There is no room for another process just now."""
    async with house.running() as task:
        await house.until_serving(1)
        spawn, failed = house.supervisor._spawn, asyncio.Event()

        async def failing():
            house.supervisor._spawn = spawn
            failed.set()
            raise BlockingIOError("fork: no more processes")

        house.supervisor._spawn = failing
        house.supervisor.request_restart()
        await failed.wait()
        await rig.send({"messages": [{"role": "user", "content": "x"}]}, x_request_id="r")
        await rig.until_replied("r")
        house.supervisor.request_restart()
        await house.until_serving(2)
    assert await task == 0


async def test_without_memory_for_two_the_old_process_drains_first(rig, house):
    """One of them at a time; nothing is lost."""
    house.memory.free = 99  # one less than a child has
    house.engines = [ScriptedEngine(tokens_per_second=200), ScriptedEngine()]
    async with house.running() as task:
        await house.until_serving(1)
        await send(rig, ["r"], "[[tokens=40]]")
        await rig.until_replied("r")
        house.supervisor.request_restart()
        await house.until_serving(2)
        assert len(house.supervisor.pids) == 1
        assert len(rig.answer("r")) == 40
    assert await task == 0
    assert await rig.uncommitted() == {}


async def test_the_end_of_the_serving_process_is_the_end_of_all(house):
    """Whoever started the worker starts it again; the exit code says how it ended."""
    async with house.running() as task:
        await house.until_serving(1)
        house.processes[0].kill()
        assert await task == 137


async def test_the_second_stop_does_not_wait_for_the_grace(rig, house):
    """What runs is left for redelivery."""
    house.engines = [ScriptedEngine(tokens_per_second=1)]
    async with house.running() as task:
        await house.until_serving(1)
        await send(rig, ["r"], "[[tokens=60]]")
        await rig.until_replied("r")
        house.supervisor.request_stop()
        await asyncio.sleep(0)
        house.supervisor.request_stop()
        async with asyncio.timeout(2.5):
            assert await task == 0
    assert sum((await rig.uncommitted()).values()) == 1
    await rig.serve_all()
    assert len(rig.answer("r")) == 60


async def test_a_stop_does_not_wait_for_a_process_that_still_loads(house):
    """It holds no prompt: it is killed, and that is a clean end."""
    never = asyncio.Event()

    class Loading(ScriptedEngine):
        async def start(self) -> None:
            await never.wait()

    house.engines = [Loading()]
    async with house.running() as task:
        house.supervisor.request_stop()
        assert await task == 0
    assert house.processes[0].killed


async def test_a_probe_of_a_process_that_has_ended_says_so(house):
    """A reason and 503, never a hanging request."""
    async with house.running():
        child = await house.until_serving(1)
    status, _, body = await child.ask(Endpoint.PROBES, "/ready")
    assert status == 503
    assert b"has ended" in body


async def test_restarts_by_age_and_by_memory_growth_are_asked_for(house):
    """Age counts from when it serves, growth from when its caches have settled."""
    async with house.running():
        await house.until_serving(1)
        await asyncio.sleep(0)
        house.supervisor.look()
        assert not house.supervisor._wanted.is_set()
        house.time = 3600.0
        house.supervisor.look()
        await house.until_serving(2)
        await asyncio.sleep(0)
        house.time += SETTLE_SECONDS
        house.supervisor.look()
        house.memory.taken += 49
        house.supervisor.look()
        assert not house.supervisor._wanted.is_set()
        house.memory.taken += 1
        house.supervisor.look()
        await house.until_serving(3)


class HastyLink:
    """Gives its messages without ever letting go of the event loop."""

    def __init__(self, *messages) -> None:
        self.messages = list(messages)

    def send(self, kind, **fields) -> None:
        pass

    async def receive(self):
        return self.messages.pop(0) if self.messages else None


async def test_a_process_that_went_before_the_new_one_joined_is_not_waited_for():
    """Both messages were read at once: what it was answering starts here."""
    prompt = Answered(TopicPartition("t", 0), 4, 1000)
    link = HastyLink({"kind": Kind.JOIN, "elsewhere": as_fields([prompt])}, {"kind": Kind.RELEASED})
    app = SimpleNamespace(left_behind=lambda: None)
    child = Child(link, app, None, orphaned=lambda: None)
    joining = asyncio.create_task(child.may_join())
    await asyncio.sleep(0)
    await child.run()
    assert list(await joining) == []
