"""A model's chat template, rendered so that what users wrote can be told from what the template wrote."""

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.api import ChatMessage
from engine.errors import InvalidRequestError


class ChatTemplate:
    """Renders messages in a sandbox to parts: (text, from a user?)."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        self._template = environment.from_string(source)
        self._variables = variables

    def render(self, messages: Sequence[ChatMessage]) -> list[tuple[str, bool]]:
        """Parts in order, with the assistant's turn opened. Raises InvalidRequestError if the template refuses.

        Each user text travels through the template as an unguessable word and is put back afterwards, so that no text
        of a user is ever read as template or control text.
        """
        word = secrets.token_hex(16)
        stand_ins = [{"role": m.role, "content": f"{word}{index:06d}"} for index, m in enumerate(messages)]
        try:
            text = self._template.render(messages=stand_ins, add_generation_prompt=True, **self._variables)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        first, *rest = text.split(word)
        parts = [(first, False)]
        for piece in rest:
            parts += [(messages[int(piece[:6])].content, True), (piece[6:], False)]
        return [part for part in parts if part[0]]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
