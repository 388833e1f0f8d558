"""Fields that OpenAI or vLLM know and v4flash does not build: refused by name, so none is silently dropped."""

from collections.abc import Mapping
from typing import Any

from topics.errors import ErrorCode, InvalidMessage

NOTHING: tuple[Any, ...] = ()
UNBUILT_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "tools": NOTHING,
    "tool_choice": ("none",),
    "parallel_tool_calls": NOTHING,
    "functions": NOTHING,
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "audio": NOTHING,
    "modalities": (["text"],),
    "web_search_options": NOTHING,
    "prediction": NOTHING,
    "reasoning_effort": NOTHING,
    "verbosity": NOTHING,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": NOTHING,
    "structured_outputs": NOTHING,
    "guided_json": NOTHING,
    "guided_regex": NOTHING,
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "chat_template": NOTHING,
    "chat_template_kwargs": NOTHING,
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Known fields that are not built -> the values that ask for nothing and are therefore accepted; null always is."""

UNBUILT_MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "function_call", "audio")


def refuse_unbuilt(body: Mapping[str, Any]) -> None:
    """Raise InvalidMessage (`unsupported_parameter`) for the first field that asks for something not built."""
    for name, value in body.items():
        if name in UNBUILT_FIELDS and not _asks_for_nothing(name, value):
            raise _unsupported(name)
    messages = body.get("messages")
    for position, message in enumerate(messages if isinstance(messages, list) else ()):
        for name in UNBUILT_MESSAGE_FIELDS:
            if isinstance(message, dict) and message.get(name):
                raise _unsupported(f"messages.{position}.{name}")


def _asks_for_nothing(name: str, value: Any) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in UNBUILT_FIELDS[name])


def _unsupported(where: str) -> InvalidMessage:
    return InvalidMessage(ErrorCode.UNSUPPORTED_PARAMETER, f"{where} is not supported yet", where)
