"""The clients that are tried: how each is started, and what of its line is the answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from environments import HERE, NESTJS, PYTHON, SPRING

JAVA = ("java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
NEST_ERROR = "the prompt asked for an error"  # Nest has one text for an error: the worker's message


def _as_it_is(line: str) -> str:
    return line


def _of_completion(line: str) -> str:
    return str(json.loads(line)["choices"][0]["message"]["content"])


def _of_error(line: str) -> str:
    return str(json.loads(line)["error"]["code"])


@dataclass(frozen=True, slots=True)
class Client:
    """A process that reads a question a line and writes its outcome as a line: `answer` or `error`, a tab, the text.

    `error` is the part of an error that this client shows to its user.
    """

    environment: str
    command: tuple[str, ...]
    answer_of: Callable[[str], str] = _as_it_is
    error_of: Callable[[str], str] = _as_it_is
    error: str = "engine_error"


def _java(main: str) -> tuple[str, ...]:
    return (*JAVA, "-cp", f"{SPRING / 'target' / 'classes'}:{SPRING / 'libs'}/*", main)


CLIENTS = {
    "spring": Client("spring", _java("AskV4flash"), error_of=_of_error),
    "spring-typed": Client("spring", _java("AskTyped")),
    "nestjs": Client("nestjs", ("node", str(NESTJS / "ask.mjs")), error=NEST_ERROR),
    "nestjs-stream": Client("nestjs", ("node", str(NESTJS / "ask.mjs"), "stream"), error=NEST_ERROR),
    "faststream": Client("python", (str(PYTHON / "bin" / "python"), str(HERE / "python" / "ask_faststream.py"))),
    "confluent-kafka": Client("python", (str(PYTHON / "bin" / "python"), str(HERE / "python" / "ask_confluent.py"))),
    "kcat": Client("kcat", ("bash", str(HERE / "kcat" / "ask.sh")), _of_completion, _of_error),
}
