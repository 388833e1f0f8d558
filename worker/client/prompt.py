"""What a client asks: an OpenAI body, its class, and how the answer is to come."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.api import PriorityClass
from worker.broker.api import Headers


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message, or with `messages` a conversation; `body` holds further OpenAI fields and wins over ours.

    `key` keeps the prompts of a session on one partition, and in order where the route says so; the request id is the
    key when not given. `ttl_seconds` is how long an answer is worth something.
    """

    text: str
    priority: PriorityClass = PriorityClass.STANDARD
    max_tokens: int = 128
    temperature: float = 0.0
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    messages: Sequence[Mapping[str, Any]] = ()
    body: Mapping[str, Any] = field(default_factory=dict)
    key: bytes | None = None
    ttl_seconds: float | None = None

    def value(self) -> bytes:
        """The record's value: an OpenAI chat body that asks for chunks."""
        body = {
            "messages": list(self.messages) or [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            **self.body,
        }
        return json.dumps(body, ensure_ascii=False).encode()

    def headers(self, reply_topic: str) -> Headers:
        named = self.request_id.encode()
        headers: Headers = (
            ("x-request-id", named),
            ("x-correlation-id", named),
            ("x-reply-topic", reply_topic.encode()),
        )
        if self.ttl_seconds is None:
            return headers
        return (*headers, ("x-ttl-ms", b"%d" % max(1, round(self.ttl_seconds * 1000))))
