"""A client as a process: questions in, outcomes out."""

import os
import queue
import re
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from clients import Client

START_SECONDS = 90.0
ANSWER_SECONDS = 60.0
WORD = re.compile(r"ready$|(answer|final|error)\t")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the client's user sees: an answer, or an error in the client's own form."""

    kind: str
    text: str


class Conversation:
    """Ask, then take the outcome; whoever asks several clients at once takes theirs afterwards."""

    def __init__(self, name: str, client: Client, env: dict[str, str], folder: Path) -> None:
        self.client = client
        self._log = folder / f"{name}.log"
        self._lines: queue.Queue[str | None] = queue.Queue()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                client.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **env}
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until_ready(self) -> None:
        """It listens to its reply topic."""
        assert self._line(START_SECONDS) == "ready"

    def ask(self, question: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(question.encode() + b"\n")
        self._process.stdin.flush()

    def outcome(self) -> Outcome:
        """Of the oldest question without one."""
        kind, _, text = self._line(ANSWER_SECONDS).partition("\t")
        if kind == "error":
            return Outcome(kind, self.client.error_of(text))
        return Outcome("answer", self.client.answer_of(text))

    @property
    def silent(self) -> bool:
        """It has said nothing that was not asked for."""
        return self._lines.empty()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self, seconds: float) -> str:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            line = None
        assert line is not None, f"no word from the client:\n{self._log.read_text(errors='replace')[-3000:]}"
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            if WORD.match(line):  # libraries print lines of their own
                self._lines.put(line)
        self._lines.put(None)
