"""Topic names, and which topic a client may name for its replies. Knows no broker: existence is checked elsewhere."""

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from topics.errors import ErrorCode, InvalidMessage

PRIORITY_CLASSES: Final = ("urgent", "standard", "bulk")
"""Service classes, most urgent first."""

MAX_TOPIC_CHARS = 249

_TOPIC = re.compile(r"[A-Za-z0-9._-]+")
_PLAIN_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class TopicNames:
    """Our own topics below one prefix."""

    prefix: str = "v4flash"

    def prompts(self, priority: str) -> str:
        """The prompt topic of a service class."""
        return f"{self.prefix}.prompts.{priority}"

    @property
    def all_prompts(self) -> tuple[str, ...]:
        """The prompt topics, most urgent first."""
        return tuple(self.prompts(priority) for priority in PRIORITY_CLASSES)

    @property
    def control(self) -> str:
        return f"{self.prefix}.control"

    @property
    def replies(self) -> str:
        """The shared reply topic."""
        return f"{self.prefix}.replies"

    @property
    def dead_letter(self) -> str:
        return f"{self.prefix}.dead-letter"

    def reply_for(self, request_id: str) -> str:
        """The topic of one request; an id that cannot be part of a topic name is replaced by its SHA-256."""
        if _PLAIN_REQUEST_ID.fullmatch(request_id) and len(self.replies) + 1 + len(request_id) <= MAX_TOPIC_CHARS:
            return f"{self.replies}.{request_id}"
        digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{self.replies}.{digest}"

    @property
    def own(self) -> frozenset[str]:
        """Topics that no client may name for replies: writing there would feed us our own answers."""
        return frozenset({*self.all_prompts, self.control, self.dead_letter})

    @property
    def reply_prefixes(self) -> tuple[str, ...]:
        """The default allow-list of reply topics."""
        prompts = self.all_prompts
        return (self.replies, *(f"{topic}.reply" for topic in prompts), *(f"{topic}-replies" for topic in prompts))


def validate_reply_topic(
    topic: str, *, header: str, allowed_prefixes: Collection[str], forbidden: frozenset[str]
) -> str:
    """Return `topic` if a client may have its replies written there, with our credentials.

    A prefix may end in `*`, which changes nothing. Raises InvalidMessage (`invalid_reply_topic`) that names the header.
    """
    if not topic or len(topic) > MAX_TOPIC_CHARS:
        raise refused_reply_topic(header, f"must have 1 to {MAX_TOPIC_CHARS} characters")
    if not _TOPIC.fullmatch(topic) or topic in {".", ".."}:
        raise refused_reply_topic(header, "may only have letters, digits, '.', '_' and '-'")
    if topic.startswith("_"):
        raise refused_reply_topic(header, "must not start with '_'")
    if topic in forbidden:
        raise refused_reply_topic(header, "must not be a prompt, control or dead-letter topic")
    if not any(topic.startswith(prefix.removesuffix("*")) for prefix in allowed_prefixes):
        raise refused_reply_topic(header, "is outside the allowed prefixes")
    return topic


def refused_reply_topic(header: str, reason: str) -> InvalidMessage:
    """The error about a reply topic, by the name of the header that it came in."""
    return InvalidMessage(ErrorCode.INVALID_REPLY_TOPIC, f"{header}: the reply topic {reason}", header)
