"""The benchmarks' modules, which import each other by their bare names."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "ops" / "bench"


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[dict[str, ModuleType]]:
    """Those that the test file names in BENCH_MODULES, imported as their scripts do; names and search path are put
    back afterwards."""
    path, names = list(sys.path), request.module.BENCH_MODULES
    sys.path.append(str(BENCH))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)
