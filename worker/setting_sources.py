"""Where settings come from. Flags win over V4FLASH_* variables, those over the TOML file, that over the defaults.

A name nobody knows is an error that names it, in every source.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from worker.errors import SettingsError
from worker.settings import ALIASES, CONFIG_VARIABLE, ENV_PREFIX, NO_SETTINGS, Settings


class Source(StrEnum):
    """Where a value came from, the strongest first."""

    FLAG = "flag"
    ENV = "env"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and the source of each value."""

    settings: Settings
    sources: Mapping[str, Source]

    def rows(self) -> list[tuple[str, str, Source]]:
        """Name, value and source of every setting; secrets are masked."""
        dumped = self.settings.model_dump(mode="json")
        return [(name, _shown(value), self.sources[name]) for name, value in dumped.items()]


def load_settings(
    flags: Mapping[str, Any] | None = None, *, config: Path | None = None, environ: Mapping[str, str] | None = None
) -> LoadedSettings:
    """Layer all sources; a flag of None was not given. Raises SettingsError that names the setting."""
    environ = os.environ if environ is None else environ
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, Source.DEFAULT)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for source, layer in ((Source.FILE, _file(config)), (Source.ENV, _env(environ)), (Source.FLAG, given)):
        for name, value in layer.items():
            field = ALIASES.get(name, name)
            if field not in Settings.model_fields:
                raise SettingsError(f"there is no setting {_spelled(name, source)}")
            values[field], sources[field] = value, source
    try:
        return LoadedSettings(Settings(**values), sources)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        origin = f" (from {sources[str(first['loc'][0])]})" if first["loc"] else ""
        reason = first["msg"].removeprefix("Value error, ")  # pydantic's word before a message of ours
        raise SettingsError(f"{where}{origin}: {reason}" if where else reason) from None


def _env(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name not in NO_SETTINGS
    }


def _file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from None


def _spelled(name: str, source: Source) -> str:
    return ENV_PREFIX + name.upper() if source is Source.ENV else f"{name} (from {source})"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
