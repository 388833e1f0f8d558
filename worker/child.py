"""The child's end of the line to the supervisor: does what it is told, and says what the worker does."""

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from worker.health import Answering, Endpoint
from worker.lease import Answered
from worker.link import Kind, Link, Message, as_fields, from_fields


class Steerable(Protocol):
    """What the supervisor steers (`worker.app.WorkerApp`)."""

    def request_stop(self, *, at_once: bool = False) -> None: ...

    def request_hand_over(self) -> None: ...

    def answered_elsewhere(self, told: Answered) -> None: ...

    def left_behind(self) -> None: ...


class Child:
    """`Handover` over a `Link`. `run` follows the supervisor until cancelled, and calls `orphaned` when it has gone."""

    def __init__(self, link: Link, app: Steerable, answering: Answering, *, orphaned: Callable[[], None]) -> None:
        self._link = link
        self._app = app
        self._answering = answering
        self._orphaned = orphaned
        self._elsewhere: list[Answered] = []
        self._join = asyncio.Event()

    async def may_join(self) -> Collection[Answered]:
        self._link.send(Kind.LOADED)
        await self._join.wait()
        return self._elsewhere

    def serving(self) -> None:
        self._link.send(Kind.SERVING)

    def handed_over(self, running: Collection[Answered]) -> None:
        self._link.send(Kind.HANDED_OVER, running=as_fields(running))

    def answered(self, prompt: Answered) -> None:
        self._link.send(Kind.DONE, prompts=as_fields([prompt]))

    async def run(self) -> None:
        while (message := await self._link.receive()) is not None:
            if message["kind"] == Kind.ASK:
                await self._answer(message)
            else:
                self._obey(message)
        self._orphaned()

    async def _answer(self, message: Message) -> None:
        status, content_type, body = await self._answering(Endpoint(message["endpoint"]), message["path"])
        self._link.send(
            Kind.ANSWER, number=message["number"], status=status, content_type=content_type, body=body.decode()
        )

    def _obey(self, message: Message) -> None:
        match message["kind"]:
            case Kind.JOIN:
                self._elsewhere = from_fields(message["elsewhere"])
                self._join.set()
            case Kind.DONE:
                for prompt in from_fields(message["prompts"]):
                    self._app.answered_elsewhere(prompt)
            case Kind.RELEASED:
                self._elsewhere = []  # who has not joined yet waits for nobody
                self._app.left_behind()
            case Kind.HAND_OVER:
                self._app.request_hand_over()
            case Kind.STOP:
                self._app.request_stop(at_once=message["at_once"])


__all__ = ["Child", "Steerable"]
