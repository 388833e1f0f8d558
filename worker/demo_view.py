"""What the demo shows on a terminal: three classes, their answers as they stream, and a table at the end."""

import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from engine.api import PriorityClass
from worker.demo_answer import WAITING, WRITING, DemoAnswer

MAX_LINES = 3
COLOURS = {PriorityClass.URGENT: "red", PriorityClass.STANDARD: "yellow", PriorityClass.BULK: "blue"}
OUTCOMES = {"stop": "green", "length": "green", WAITING: "dim", WRITING: "cyan"}
HEADINGS = (("first token", 11), ("tokens", 6), ("tokens/s", 8), ("cached", 6), ("finish", 10))
_FIGURES_WIDTH = sum(width + 2 for _, width in HEADINGS)
_CUT = "… "  # before an answer whose beginning has no room
_FRAME = 4  # a panel's border and padding, left and right together
_HEAD_LINES = 3  # stage, headings, and the line that the cursor is on
_PICTURE_WIDTH, _PICTURE_HEIGHT = 110, 40


class DemoView:
    """Renders the answers as they are now, always at one height, so that nothing jumps."""

    def __init__(self, answers: Sequence[DemoAnswer], clock: Callable[[], float] = time.monotonic) -> None:
        self._stage, self._began = "", clock()
        self._answers = answers
        self._clock = clock
        self._spinner = Spinner("dots", style="cyan")

    def begin(self, stage: str) -> None:
        """Say what is being done from now on; the seconds it takes are counted."""
        self._stage, self._began = stage, self._clock()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        now, classes = self._clock(), list(PriorityClass)
        room = (options.size.height - _HEAD_LINES - 2 * len(classes)) // max(1, len(self._answers))
        yield self._head(now)
        yield self._headings()
        for cls in classes:
            grid = self._grid()
            for answer in self._answers:
                if answer.prompt.priority is cls:
                    grid.add_row(self._answer(answer, console, options.max_width, room), *self._figures(answer, now))
            yield Panel(grid, title=f"[bold]{cls}[/]", title_align="left", border_style=COLOURS[cls])

    def _head(self, now: float) -> RenderableType:
        done = sum(answer.reader.settled for answer in self._answers)
        tokens = sum(answer.num_tokens for answer in self._answers)
        self._spinner.update(text=Text.assemble((self._stage, "bold"), f" ({now - self._began:.0f} s)"))
        starts = [answer.first for answer in self._answers if answer.first is not None]
        ends = [answer.ended or now for answer in self._answers]
        rate = f", {tokens / span:.0f} a second" if starts and (span := max(ends) - min(starts)) > 0.1 else ""
        head = Table.grid(expand=True)
        head.add_column(ratio=1, no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        figures = f"{done} of {len(self._answers)} answered, {tokens} tokens{rate}"
        head.add_row(Text(self._stage, "bold green") if done == len(self._answers) else self._spinner, figures)
        return head

    def _headings(self) -> RenderableType:
        grid = self._grid()
        grid.add_row("", *(Text(name, "dim") for name, _ in HEADINGS))
        return Padding(grid, (0, _FRAME // 2))

    @staticmethod
    def _grid() -> Table:
        grid = Table.grid(expand=True, padding=(0, 0, 0, 2))
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for _, width in HEADINGS:
            grid.add_column(width=width + 2, justify="right", no_wrap=True)  # rich counts the padding in
        return grid

    @staticmethod
    def _answer(answer: DemoAnswer, console: Console, width: int, room: int) -> Text:
        """The prompt in a line, if there is room for it, and the newest lines of the answer."""
        lines = max(1, min(MAX_LINES, room - 1))
        told = Text(_one_line(answer.reader.text))
        if answer.outcome == WRITING:
            told.append("▌", "cyan")
        wrapped = list(told.wrap(console, max(20, width - _FRAME - _FIGURES_WIDTH - len(_CUT))))
        if len(wrapped) > lines:
            wrapped = wrapped[-lines:]
            wrapped[0] = Text(_CUT, "dim") + wrapped[0]
        asked = [Text(answer.prompt.text, "dim italic")] if room > 1 else []
        return Text("\n").join([*asked, *wrapped, *[Text()] * (lines - len(wrapped))])

    @staticmethod
    def _figures(answer: DemoAnswer, now: float) -> Iterator[Text]:
        first, rate, cached = answer.first_token_seconds, answer.tokens_per_second(now), answer.num_cached_tokens
        yield Text("" if first is None else f"{first:.2f} s")
        yield Text(str(answer.num_tokens or ""))
        yield Text("" if rate is None else f"{rate:.1f}")
        yield Text("" if cached is None else str(cached))
        yield Text(answer.outcome, OUTCOMES.get(answer.outcome, "red"))


def summary(answers: Sequence[DemoAnswer]) -> Table:
    """The table at the end."""
    table = Table()
    for heading in ("class", "first token", "tokens", "tokens/s", "cached tokens", "finish reason"):
        table.add_column(heading, justify="left" if heading in ("class", "finish reason") else "right")
    for answer in answers:
        first, rate = answer.first_token_seconds, answer.tokens_per_second(answer.ended or 0.0)
        cached = answer.num_cached_tokens
        table.add_row(
            Text(answer.prompt.priority, COLOURS[answer.prompt.priority]),
            "" if first is None else f"{first:.2f} s",
            str(answer.num_tokens),
            "" if rate is None else f"{rate:.1f}",
            "" if cached is None else str(cached),
            Text(answer.outcome, OUTCOMES.get(answer.outcome, "red")),
        )
    return table


def save_picture(view: DemoView, path: Path) -> None:
    """Write the view as an SVG that fetches nothing from elsewhere."""
    console = Console(
        record=True, width=_PICTURE_WIDTH, height=_PICTURE_HEIGHT, file=io.StringIO(), force_terminal=True
    )
    console.print(view)
    picture = console.export_svg(title="v4flash demo")
    path.write_text(re.sub(r"@font-face\s*\{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


def _one_line(text: str) -> str:
    """`text` without line breaks and control characters, which belong to nobody but the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
