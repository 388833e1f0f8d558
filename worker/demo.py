"""The demo: a broker, a worker and a client in one process, nine prompts over the three classes, and a table."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

from engine.api import PriorityClass
from topics.attempts import AttemptReader, AttemptState, EventKind
from worker.broker.api import Broker
from worker.broker.memory import MemoryBroker
from worker.client import Prompt, ask_all
from worker.demo_broker import embedded_broker
from worker.metrics import Metrics
from worker.provision import RECORD_OVERHEAD_BYTES, create_topics, topics_of
from worker.serve import build_app, build_broker, build_engine
from worker.settings import Settings

NUM_PARTITIONS = 3
LIVE_REFRESH_PER_SECOND = 8
SHOWN_CHARS = 60
_PROMPTS = {
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


@dataclass(slots=True)
class _Row:
    """One prompt and what has come of it. Times are monotonic seconds."""

    prompt: Prompt
    answer: AttemptReader = field(default_factory=AttemptReader)
    sent: float = 0.0
    first: float | None = None
    ended: float | None = None

    def cells(self) -> tuple[str, ...]:
        usage = self.answer.usage or {}
        tokens = usage.get("completion_tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", "")
        first = "" if self.first is None else f"{self.first - self.sent:.2f} s"
        rate = ""
        if tokens and self.first is not None and self.ended is not None and self.ended > self.first:
            rate = f"{tokens / (self.ended - self.first):.1f}"
        failed = (self.answer.error or {}).get("code", "")
        return self.prompt.priority, first, rate, str(cached), str(self.answer.finish_reasons.get(0, failed))


async def run_demo(settings: Settings, *, live: bool, bootstrap: str | None, memory: bool) -> int:
    """Exit code 0 when every prompt has a complete answer. The live view needs a terminal."""
    console = Console()
    live = live and console.is_terminal
    settings = settings.model_copy(update={"group_id": f"{settings.group_id}-demo-{time.time_ns():x}"})
    async with AsyncExitStack() as leaving:
        broker = await _broker(settings, leaving, console, bootstrap=bootstrap, memory=memory)
        topics = topics_of(settings.names, max_body_bytes=settings.max_body_bytes, num_partitions=NUM_PARTITIONS)
        await create_topics(broker.admin(), topics)
        console.print(f"loading the {settings.engine} engine")
        engine = build_engine(settings)
        await engine.start()
        console.print(f"model {engine.model.name}, {engine.model.max_model_len} tokens of context")
        app = build_app(settings.model_copy(update={"from_beginning": True}), broker, engine, Metrics())
        rows = [
            _Row(Prompt(text, cls, num_tokens)) for cls, prompts in _PROMPTS.items() for text, num_tokens in prompts
        ]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(app.run())
            await _answer_all(broker, settings, rows, console, live=live)
            app.request_stop()
        console.print(_table(rows))
        return 0 if all(row.answer.state is AttemptState.COMPLETE for row in rows) else 1


async def _broker(
    settings: Settings, leaving: AsyncExitStack, console: Console, *, bootstrap: str | None, memory: bool
) -> Broker:
    servers = bootstrap
    if servers is None and not memory:
        servers = await leaving.enter_async_context(embedded_broker())
    if servers is None:
        console.print("broker: in memory")
        return MemoryBroker(max_message_bytes=settings.max_body_bytes + RECORD_OVERHEAD_BYTES)
    console.print(f"broker: {servers}  (read along: v4flash tail --bootstrap-servers {servers})")
    return build_broker(settings.model_copy(update={"bootstrap_servers": servers}))


async def _answer_all(
    broker: Broker, settings: Settings, rows: Sequence[_Row], console: Console, *, live: bool
) -> None:
    if not live:
        await _follow(broker, settings, rows, console)
        return
    with Live(get_renderable=lambda: _table(rows, texts=True), refresh_per_second=LIVE_REFRESH_PER_SECOND):
        await _follow(broker, settings, rows, None)


async def _follow(broker: Broker, settings: Settings, rows: Sequence[_Row], console: Console | None) -> None:
    """Follow all answers. Without a live view each piece is a line: several answers stream at once."""
    by_id = {row.prompt.request_id: row for row in rows}
    for row in rows:
        row.sent = time.monotonic()
    async for request_id, event in ask_all(broker, settings.names, [(row.prompt, row.answer) for row in rows]):
        row = by_id[request_id]
        if event.kind is EventKind.TEXT:
            row.first = row.first or time.monotonic()
            if console is not None:
                console.print(f"[{row.prompt.priority}] {event.text!r}", markup=False, highlight=False)
        if row.answer.settled:
            row.ended = time.monotonic()


def _table(rows: Sequence[_Row], *, texts: bool = False) -> Table:
    table = Table("class", "first token", "tokens/s", "cached tokens", "finish reason")
    if texts:
        table.add_column("answer", no_wrap=True)
    for row in rows:
        shown = row.answer.text.replace("\n", " ")[-SHOWN_CHARS:]
        table.add_row(*row.cells(), *([shown] if texts else []))
    return table
