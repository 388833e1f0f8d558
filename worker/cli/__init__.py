"""The command line. `main` is `v4flash`, `worker_main` is `v4flash-server` (the same as `v4flash worker`)."""

import sys

from engine.errors import EngineError
from worker.broker.api import BrokerError
from worker.cli.app import app
from worker.errors import WorkerError

EXIT_FAILED = 1


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code; a failure is one line on standard error."""
    try:
        app(sys.argv[1:] if arguments is None else arguments)
    except (WorkerError, BrokerError, EngineError) as error:
        print(f"v4flash: {error or type(error).__name__}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def worker_main() -> None:
    """`v4flash worker` with the arguments of the process."""
    main(["worker", *sys.argv[1:]])
