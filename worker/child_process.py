"""One child of the supervisor: its process, its end of the line, and how far it has come."""

import asyncio
import itertools
from collections.abc import Sequence
from enum import StrEnum
from http import HTTPStatus
from typing import Protocol

from worker.health import Answer, Endpoint, told
from worker.lease import Answered
from worker.link import Kind, Link, Message, as_fields, from_fields

ASK_SECONDS = 3.0


class Process(Protocol):
    """A running process."""

    pid: int

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""

    def kill(self) -> None:
        """End it now; nothing happens when it has ended."""


class ChildState(StrEnum):
    """LOADING holds no prompt and no place in the group; HANDED_OVER answers what it had and takes nothing new."""

    LOADING = "loading"
    LOADED = "loaded"
    JOINING = "joining"
    SERVING = "serving"
    HANDED_OVER = "handed over"
    ENDED = "ended"


_NEXT = {
    ChildState.LOADING: {ChildState.LOADED, ChildState.ENDED},
    ChildState.LOADED: {ChildState.JOINING, ChildState.ENDED},
    ChildState.JOINING: {ChildState.SERVING, ChildState.HANDED_OVER, ChildState.ENDED},
    ChildState.SERVING: {ChildState.HANDED_OVER, ChildState.ENDED},
    ChildState.HANDED_OVER: {ChildState.ENDED},
    ChildState.ENDED: set[ChildState](),
}
IDLE = frozenset({ChildState.LOADING, ChildState.LOADED})
"""Nothing is lost when such a child is killed."""

ENDED = told("the process that served has ended")


class ChildProcess:
    """`follow` has to run until the end of the process. `heir` is the child that waits for what this one answers."""

    def __init__(self, process: Process, link: Link) -> None:
        self.process = process
        self.state = ChildState.LOADING
        self.running: list[Answered] = []
        self.exit_code: int | None = None
        self.heir: ChildProcess | None = None
        self._dispensable = False
        self._link = link
        self._changed = asyncio.Event()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Answer]] = {}

    def __repr__(self) -> str:
        return f"ChildProcess(pid={self.process.pid}, {self.state})"

    async def follow(self) -> int:
        """Take in what the child says until it ends; its exit code, 128 and the number for a signal."""
        while (message := await self._link.receive()) is not None:
            self._take(message)
        exit_code = await self.process.wait()
        self.exit_code = 0 if self._dispensable else exit_code if exit_code >= 0 else 128 - exit_code
        self._link.close()
        self._move(ChildState.ENDED)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(ENDED)
        if self.heir is not None:
            self.heir.release()
        return self.exit_code

    async def until(self, *states: ChildState) -> ChildState:
        """Returns when it is in one of these states, or has ended."""
        while self.state not in states and self.state is not ChildState.ENDED:
            await self._changed.wait()
        return self.state

    def join(self, elsewhere: Sequence[Answered]) -> None:
        self._move(ChildState.JOINING)
        self._link.send(Kind.JOIN, elsewhere=as_fields(elsewhere))

    def hand_over(self, heir: "ChildProcess") -> None:
        self.heir = heir
        self._link.send(Kind.HAND_OVER)

    def release(self) -> None:
        """Whatever another child was answering and has not told of is free."""
        self._link.send(Kind.RELEASED)

    def stop(self, *, at_once: bool = False) -> None:
        """Ask it to drain; one that holds no prompt, or must end at once, is not asked for long."""
        if self.state in IDLE:
            self._dispensable = True
            self.process.kill()
        else:
            self._link.send(Kind.STOP, at_once=at_once)

    async def ask(self, endpoint: Endpoint, path: str) -> Answer:
        """What the child answers; 503 when it does not in time."""
        if self.state is ChildState.ENDED:
            return ENDED
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self._link.send(Kind.ASK, number=number, endpoint=endpoint, path=path)
        try:
            done, _ = await asyncio.wait({asked}, timeout=ASK_SECONDS)
            return asked.result() if done else told(f"the process that serves does not answer ({self.state})")
        finally:
            del self._asked[number]

    def _take(self, message: Message) -> None:
        match message["kind"]:
            case Kind.LOADED:
                self._move(ChildState.LOADED)
            case Kind.SERVING if self.state is ChildState.JOINING:
                self._move(ChildState.SERVING)
            case Kind.HANDED_OVER:
                self.running = from_fields(message["running"])
                self._move(ChildState.HANDED_OVER)
            case Kind.DONE if self.heir is not None:
                self.heir.tell_done(message)
            case Kind.ANSWER:
                asked = self._asked.get(message["number"])
                if asked is not None and not asked.done():
                    body = message["body"].encode()
                    asked.set_result(Answer(HTTPStatus(message["status"]), message["content_type"], body))

    def tell_done(self, message: Message) -> None:
        """Pass on what another child has answered."""
        self._link.send(Kind.DONE, prompts=message["prompts"])

    def _move(self, state: ChildState) -> None:
        if state not in _NEXT[self.state]:
            raise ValueError(f"{self!r} cannot become {state}")
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
