"""The demo: a broker, a worker and a client in one process, nine prompts over the three classes, and a table."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live

from engine.api import PriorityClass
from topics.attempts import EventKind
from worker.broker.api import Broker
from worker.broker.memory import MemoryBroker
from worker.client import Client, Prompt
from worker.demo_answer import DemoAnswer
from worker.demo_broker import embedded_broker
from worker.demo_view import DemoView, save_picture, summary
from worker.metrics import Metrics
from worker.provision import RECORD_OVERHEAD_BYTES, create_topics, topics_of
from worker.serve import build_app, build_broker, build_engine
from worker.settings import Settings

NUM_PARTITIONS = 3
LIVE_REFRESH_PER_SECOND = 10
PROMPTS = {
    PriorityClass.URGENT: (
        ("Is this comment polite? Answer yes or no: 'Thank you for your help.'", 24),
        ("Is this comment polite? Answer yes or no: 'Go away, nobody likes you.'", 24),
        ("Name the capital of France in one sentence.", 24),
    ),
    PriorityClass.STANDARD: (
        ("Explain in two sentences why the sky is blue.", 64),
        ("Give me three tips for writing clear email.", 64),
        ("What is a message queue? Answer in two sentences.", 64),
    ),
    PriorityClass.BULK: (
        ("Summarise in one sentence: A consumer group shares the partitions of a topic among its members.", 48),
        ("Summarise in one sentence: A consumer group commits the offset of the next record it wants.", 48),
        ("Summarise in one sentence: A consumer group rebalances whenever a member joins or leaves.", 48),
    ),
}

PATIENCE_MS = 120_000

Say = Callable[[str], None]


async def run_demo(
    settings: Settings, *, live: bool, bootstrap: str | None, memory: bool, picture: Path | None = None
) -> int:
    """Exit code 0 when every prompt has a complete answer. `live` needs a terminal; `picture` is an SVG of the view."""
    console = Console()
    settings = for_show(settings)
    answers = [
        DemoAnswer(Prompt(text, cls, num_tokens)) for cls, prompts in PROMPTS.items() for text, num_tokens in prompts
    ]
    view = DemoView(answers)
    shown = console.is_terminal and live
    async with AsyncExitStack() as leaving:
        address = None if memory else bootstrap or await leaving.enter_async_context(embedded_broker())
        console.print(_where(address), highlight=False, soft_wrap=True)
        say = await leaving.enter_async_context(_staged(console, view, live=shown))
        say("creating the topics")
        broker = await _broker(settings, address)
        say(_loading(settings))
        engine = await asyncio.to_thread(build_engine, settings)
        await engine.start()
        say(f"{engine.model.name} answers")
        app = build_app(settings.model_copy(update={"from_beginning": True}), broker, engine, Metrics())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(app.run())
            await _follow(broker, settings, answers, None if shown else console)
            app.request_stop()
        say(f"{engine.model.name} has answered")
    if picture is not None:
        save_picture(view, picture)
    console.print(summary(answers))
    return 0 if all(answer.complete for answer in answers) else 1


def for_show(settings: Settings) -> Settings:
    """A group of its own, and no stall limit that a busy machine may meet: who watches sees that it is slow."""
    patient = {
        name: max(getattr(settings, name), PATIENCE_MS) for name in ("streaming_timeout_ms", "first_token_timeout_ms")
    }
    return settings.model_copy(update={"group_id": f"{settings.group_id}-demo-{time.time_ns():x}", **patient})


def _loading(settings: Settings) -> str:
    if settings.engine == "scripted":
        return "starting the scripted engine"
    return f"loading {settings.model_dir or 'the bundled small model'}"


def _where(address: str | None) -> str:
    if address is None:
        return "broker: in memory"
    return f"broker: {address}  (read along: v4flash tail --bootstrap-servers {address})"


async def _broker(settings: Settings, address: str | None) -> Broker:
    """The broker at `address`, or one in memory, with the topics of the demo."""
    if address is None:
        broker: Broker = MemoryBroker(max_message_bytes=settings.max_body_bytes + RECORD_OVERHEAD_BYTES)
    else:
        broker = build_broker(settings.model_copy(update={"bootstrap_servers": address}))
    topics = topics_of(settings.names, max_body_bytes=settings.max_body_bytes, num_partitions=NUM_PARTITIONS)
    await create_topics(broker.admin(), topics)
    return broker


@asynccontextmanager
async def _staged(console: Console, view: DemoView, *, live: bool) -> AsyncIterator[Say]:
    """Say what is being done now: in the head of the live view, or as lines."""

    def say(stage: str) -> None:
        view.begin(stage)
        if not live:
            console.print(stage, markup=False, highlight=False)

    if not live:
        yield say
        return
    with Live(view, console=console, refresh_per_second=LIVE_REFRESH_PER_SECOND):
        yield say


async def _follow(broker: Broker, settings: Settings, answers: Sequence[DemoAnswer], console: Console | None) -> None:
    """Follow all answers. With a console each piece is a line: several answers stream at once."""
    async with Client(broker, settings.names) as client, asyncio.TaskGroup() as tasks:
        for answer in answers:
            tasks.create_task(_follow_one(client, answer, console))


async def _follow_one(client: Client, answer: DemoAnswer, console: Console | None) -> None:
    answer.sent = time.monotonic()
    async for event in client.events(answer.prompt, answer.reader):
        answer.seen(event, time.monotonic())
        if console is not None and event.kind is EventKind.TEXT:
            console.print(f"[{answer.prompt.priority}] {event.text!r}", markup=False, highlight=False)
