"""A model's chat template, rendered so that text of a user can be told from text of the template."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.api import ChatMessage
from engine.errors import InvalidRequestError, ModelLoadError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ChatTemplate:
    """A jinja2 template in a sandbox. Raises ModelLoadError when the template itself is faulty."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        environment.filters["tojson"] = _to_json
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template of the model cannot be read: {error}") from error

    def render(self, messages: Sequence[ChatMessage]) -> Iterator[tuple[str, bool]]:
        """Pieces of the conversation in order, each with whether a user wrote it; the assistant's turn is opened.

        The template sees a random placeholder for each content, so nothing in a content can steer it. Raises
        InvalidRequestError when it refuses the conversation, or leaves the last message out.
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        nonce = secrets.token_hex(16)
        shown: list[dict[str, str]] = []
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidRequestError(f"role must be one of {sorted(ROLES)}", param="messages")
            shown.append({"role": message.role, "content": f"{nonce}-{index}-" if message.content else ""})
        try:
            text = self._template.render(messages=shown, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses the conversation: {error}", param="messages"
            ) from error
        if shown[-1]["content"] not in text:
            raise InvalidRequestError("the model's chat template has no place for the last message", param="messages")
        return self._pieces(text, nonce, messages)

    @staticmethod
    def _pieces(text: str, nonce: str, messages: Sequence[ChatMessage]) -> Iterator[tuple[str, bool]]:
        head, *rest = text.split(f"{nonce}-")
        if head:
            yield head, False
        for piece in rest:
            index, _, tail = piece.partition("-")
            yield messages[int(index)].content, True
            if tail:
                yield tail, False


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
