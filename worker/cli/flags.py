"""A command's flags made from the fields of `Settings`, so that no setting can lack its flag."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from worker.cli.settings_help import CLIENT_SETTINGS, SETTINGS_HELP
from worker.setting_sources import LoadedSettings, load_settings
from worker.settings import ALIASES, Settings

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]


Command = Callable[..., None]
DEFAULTS = {name: value for name, value, _ in load_settings(environ={}).rows()}


def with_settings(command: Command) -> Command:
    """Give `command(loaded: LoadedSettings, ...)` a flag for each setting; its own parameters stay."""
    return _with_settings(command, shown=frozenset(Settings.model_fields))


def with_client_settings(command: Command) -> Command:
    """`with_settings` for a command that only talks to the broker: its help shows what matters there."""
    return _with_settings(command, shown=CLIENT_SETTINGS)


def with_group_settings(command: Command) -> Command:
    """`with_client_settings` for a command that looks at what the workers share."""
    return _with_settings(command, shown=CLIENT_SETTINGS | {"group_id", "routes"})


def _with_settings(command: Command, *, shown: frozenset[str]) -> Command:
    def run(config: Path | None = None, **values: Any) -> None:
        flags = {name: values.pop(name) for name in Settings.model_fields}
        command(load_settings(flags, config=config), **values)

    own = list(inspect.signature(command).parameters.values())[1:]
    made = [_parameter("config", ConfigFile)]
    made += [_parameter(name, _flag(name, hidden=name not in shown)) for name in Settings.model_fields]
    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    signature = inspect.Signature([*keyword, *made])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(name: str, *, hidden: bool) -> Any:
    field = Settings.model_fields[name]
    spelled = [f"--{name.replace('_', '-')}"]
    spelled += [f"--{alias.replace('_', '-')}" for alias, target in ALIASES.items() if target == name]
    said = f"{SETTINGS_HELP.get(name, '')} {_default(name)}".strip()
    if field.annotation is bool:
        switch = f"{spelled[0]}/--no-{name.replace('_', '-')}"
        return Annotated[bool | None, typer.Option(switch, help=said, hidden=hidden)]
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    metavar = f"[{'|'.join(choices)}]" if choices else "VALUE"
    return Annotated[str | None, typer.Option(*spelled, metavar=metavar, help=said, hidden=hidden)]


def _default(name: str) -> str:
    """The default as `config show` spells it; nothing for a setting that is off without a value."""
    value = DEFAULTS[name]
    return "" if value in ("null", "[]") else f"Default {value}."


__all__ = ["ConfigFile", "LoadedSettings", "with_client_settings", "with_group_settings", "with_settings"]
