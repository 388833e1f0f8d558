"""Functions of the operator's own, named in the settings as 'module:function'."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from worker.errors import StartError


def load_function(setting: str, place: str) -> Callable[..., Any]:
    """The function at `place`. Raises StartError that names the setting."""
    module, _, name = place.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise StartError(f"{setting}: there is no {place} ({error})") from None
    if not callable(function):
        raise StartError(f"{setting}: {place} is no function")
    return function  # type: ignore[no-any-return]
