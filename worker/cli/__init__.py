"""The command line. `main` is `v4flash`; the others are its commands under names of their own."""

import sys
from typing import NoReturn

from engine.errors import EngineError
from worker.broker.api import BrokerError
from worker.cli.app import app
from worker.errors import WorkerError

EXIT_FAILED = 1
EXPLAINED = (WorkerError, BrokerError, EngineError)  # their text says what to mend; anything else is ours to mend


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code; a failure is one line on standard error."""
    try:
        app(sys.argv[1:] if arguments is None else arguments, prog_name="v4flash")
    except EXPLAINED as error:
        _fail(error)
    except BaseExceptionGroup as group:
        explained = group.subgroup(EXPLAINED)
        if explained is None:
            raise
        _fail(_first(explained))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(error: BaseException) -> NoReturn:
    print(f"v4flash: {error or type(error).__name__}", file=sys.stderr)
    sys.exit(EXIT_FAILED)


def _command(name: str) -> NoReturn:
    main([name, *sys.argv[1:]])
    sys.exit(0)


def demo_main() -> None:
    """`v4flash demo` as a command of its own."""
    _command("demo")


def submit_main() -> None:
    """`v4flash submit` as a command of its own."""
    _command("submit")


def tail_main() -> None:
    """`v4flash tail` as a command of its own."""
    _command("tail")


def cancel_main() -> None:
    """`v4flash cancel` as a command of its own."""
    _command("cancel")


def topics_main() -> None:
    """`v4flash topics` as a command of its own."""
    _command("topics")


def dead_letter_main() -> None:
    """`v4flash dead-letter` as a command of its own."""
    _command("dead-letter")


def doctor_main() -> None:
    """`v4flash doctor` as a command of its own."""
    _command("doctor")


def inspect_main() -> None:
    """`v4flash inspect` as a command of its own."""
    _command("inspect")


def worker_main() -> None:
    """`v4flash worker` with the arguments of the process."""
    _command("worker")
