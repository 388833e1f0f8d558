"""How the value of a setting may be written where it is one line of text: names by commas, tables as JSON."""

import json
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from worker.dead_letter import EVERY_TENANT


def _from_json(text: str, example: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise PydanticCustomError("json", "is not JSON, such as {example}", {"example": example}) from None


def names(value: Any) -> Any:
    """A list, also as JSON or separated by commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _from_json(value, '["one", "two"]')
    return [part.strip() for part in value.split(",") if part]


def json_like(example: str) -> BeforeValidator:
    """A value as TOML has it, also as JSON like the example."""
    return BeforeValidator(lambda value: _from_json(value, example) if isinstance(value, str) else value)


def values_by_tenant(value: Any) -> Any:
    """One word for all, or an object of tenants, also as JSON."""
    if value in ("keep", "digest"):
        return {EVERY_TENANT: value}
    return _from_json(value, 'keep, digest or {"acme": "digest"}') if isinstance(value, str) else value
