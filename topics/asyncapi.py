"""The wire contract as an AsyncAPI 3 document, made from the models that validate it.

`python -m topics.asyncapi` writes it to `ops/asyncapi.json`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from topics.header_help import HEADER_HELP
from topics.headers import ALIASES, REPLY_MODES
from topics.names import PRIORITY_CLASSES, TopicNames
from topics.progress import ProgressBody, ProgressHeaders
from topics.reply_bodies import REPLIES, ReplyHeaders
from topics.requests import OPERATIONS

DEFAULT_PATH = Path("ops") / "asyncapi.json"
CONTRACT_VERSION = "0.1.0"

_REF = "#/components/schemas/{model}"
_ENUMS = {"reply_mode": REPLY_MODES, "priority": PRIORITY_CLASSES, "operation": tuple(OPERATIONS)}


def asyncapi_document(names: TopicNames | None = None) -> dict[str, Any]:
    """The whole contract, by the default topic names where none are given; plain JSON types, same order every time."""
    names = names or TopicNames()
    schemas: dict[str, Any] = {"RequestHeaders": _request_headers()}
    models: list[type[BaseModel]] = [*OPERATIONS.values(), *REPLIES.values(), ReplyHeaders]
    models += [ProgressBody, ProgressHeaders]
    for model in models:
        _add_schema(schemas, model)
    requests = {model.__name__: _message(model.__name__, "RequestHeaders") for model in OPERATIONS.values()}
    replies = {name: _message(name, "ReplyHeaders") for name in REPLIES}
    replies["ProgressBody"] = _message("ProgressBody", "ProgressHeaders")
    prompts = {f"prompts-{name}": names.prompts(name) for name in PRIORITY_CLASSES}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "v4flash",
            "version": CONTRACT_VERSION,
            "description": "Prompts in, answers out. A reader applies the attempt rule: assemble each x-attempt by "
            "itself; the first record with x-final whose attempt is complete from x-seq 0 settles the request.",
        },
        "defaultContentType": "application/json",
        "channels": {
            **{channel: _channel(topic, requests) for channel, topic in prompts.items()},
            "replies": _channel(names.replies, replies),
            "reply": _channel(names.replies + ".{requestId}", replies)
            | {"parameters": {"requestId": {"description": "The request id, or its SHA-256 in hex."}}},
        },
        "operations": {f"answer-{name}": _receive(f"prompts-{name}") for name in PRIORITY_CLASSES},
        "components": {"messages": requests | replies, "schemas": schemas},
    }


def _add_schema(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template=_REF, by_alias=True)
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema


def _request_headers() -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for field, aliases in ALIASES.items():
        for alias in aliases:
            properties[alias] = {"type": "string", "description": HEADER_HELP[field]}
            if field in _ENUMS:
                properties[alias]["enum"] = list(_ENUMS[field])
    return {"type": "object", "properties": properties}


def _message(name: str, headers: str) -> dict[str, Any]:
    return {
        "name": name,
        "contentType": "application/json",
        "headers": {"$ref": _REF.format(model=headers)},
        "payload": {"$ref": _REF.format(model=name)},
    }


def _channel(address: str, messages: Mapping[str, Any]) -> dict[str, Any]:
    return {"address": address, "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages}}


def _receive(channel: str) -> dict[str, Any]:
    return {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{channel}"},
        "reply": {"channel": {"$ref": "#/channels/replies"}},
    }


def main() -> None:
    DEFAULT_PATH.write_text(json.dumps(asyncapi_document(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
