"""All clients whose tools are here, beside one worker, for the whole run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # no packages: nothing imports them
sys.path.append(str(Path(__file__).parents[1] / "drills"))  # they start workers too

from broker import KafkaServer
from clients import CLIENTS
from environments import ENVIRONMENTS, missing_tools, prepare
from stage import Stage


def _why_not(environment: str) -> str | None:
    """None when the environment is ready to run, made now if it was not there."""
    if missing := missing_tools(environment):
        return f"needs {' and '.join(missing)}, not found on this machine"
    try:
        prepare(environment)
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot be set up here: {error}"
    return None


@pytest.fixture(scope="session")
def reasons() -> dict[str, str | None]:
    """Environment -> why its clients cannot be tried, or None."""
    return {name: _why_not(name) for name in ENVIRONMENTS}


@pytest.fixture(scope="session")
def stage(kafka: KafkaServer, reasons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    names = [name for name, client in CLIENTS.items() if reasons[client.environment] is None]
    stage = Stage(kafka.bootstrap_servers, tmp_path_factory.mktemp("interop"), names)
    try:
        stage.serve()
        stage.until_ready()
        yield stage
    finally:
        stage.stop()


@pytest.fixture(params=CLIENTS)
def name(request: pytest.FixtureRequest, reasons) -> str:
    """Each client; skipped with the reason where it cannot run, failed with REQUIRE_INTEROP=1."""
    reason = reasons[CLIENTS[request.param].environment]
    if reason is not None:
        (pytest.fail if os.environ.get("REQUIRE_INTEROP") == "1" else pytest.skip)(f"{request.param} {reason}")
    return str(request.param)
