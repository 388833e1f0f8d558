"""A command's flags made from the fields of `Settings`, so that no setting can lack its flag."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from worker.settings import ALIASES, LoadedSettings, Settings, load_settings

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(loaded: LoadedSettings, ...)` a flag for each setting; its own parameters stay."""

    def run(config: Path | None = None, **values: Any) -> None:
        flags = {name: values.pop(name) for name in Settings.model_fields}
        command(load_settings(flags, config=config), **values)

    own = list(inspect.signature(command).parameters.values())[1:]
    made = [_parameter("config", ConfigFile)] + [_parameter(name, _flag(name)) for name in Settings.model_fields]
    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    signature = inspect.Signature([*keyword, *made])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(name: str) -> Any:
    field = Settings.model_fields[name]
    spelled = [f"--{name.replace('_', '-')}"]
    spelled += [f"--{alias.replace('_', '-')}" for alias, target in ALIASES.items() if target == name]
    if field.annotation is bool:
        no = f"--no-{name.replace('_', '-')}"
        return Annotated[bool | None, typer.Option("/".join([spelled[0], no]), help=f"Default {field.default}.")]
    default = field.get_default(call_default_factory=True)
    return Annotated[str | None, typer.Option(*spelled, metavar="VALUE", help=f"Default {default!r}.")]


__all__ = ["ConfigFile", "LoadedSettings", "with_settings"]
