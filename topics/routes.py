"""Which topics carry prompts, and what the topic alone says about them: class, tenant, where answers go."""

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from topics.headers import ALIASES, ReplyMode
from topics.names import PRIORITY_CLASSES, TopicNames
from topics.replies import NEST_END_HEADER, NEST_ERROR_HEADER
from topics.reply_bodies import ReplyHeaders

TENANT_GROUP = "tenant"
TENANT_MARK = "{tenant}"
MAX_REPLY_HEADERS = 16
OUR_HEADERS = frozenset(
    [field.alias or name for name, field in ReplyHeaders.model_fields.items()]
    + [alias for aliases in ALIASES.values() for alias in aliases]
    + [NEST_END_HEADER, NEST_ERROR_HEADER]
)
"""Headers whose meaning on a reply is ours, in lower case."""

TopicName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
ReplyPrefix = Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]|\{tenant\}){1,249}$")]
HeaderName = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
HeaderText = Annotated[str, Field(pattern=r"^[ -~]{1,512}$")]
Priority = Literal["urgent", "standard", "bulk"]


class Route(BaseModel):
    """Prompts of the `topics`, or of all topics that `pattern` matches from end to end.

    With `order: key` the prompts of one key of a partition run one after another, in their order; else in any order.
    The tenant is `tenant` or the pattern's group of that name; `output_topic` None is the shared reply topic.
    `reply_prefixes` say which reply topics these prompts may name, instead of those of the settings: the names
    themselves and what follows them after a dot; `{tenant}` stands for the tenant.
    `reply_headers` stand on every reply, errors too: Spring's `__TypeId__`, for example.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    topics: tuple[TopicName, ...] = ()
    pattern: str | None = None
    priority: Priority = "standard"
    tenant: str | None = None
    output_topic: TopicName | None = None
    reply_prefixes: tuple[ReplyPrefix, ...] = ()
    reply_mode: ReplyMode = "final"
    reply_headers: dict[HeaderName, HeaderText] = Field(default_factory=dict, max_length=MAX_REPLY_HEADERS)
    trust_tenant: bool = False
    order: Literal["none", "key"] = "none"

    @model_validator(mode="after")
    def _one_way_to_match(self) -> Self:
        if bool(self.topics) == (self.pattern is not None):
            raise ValueError("a route has either topics or a pattern")
        if self.pattern is None:
            return self
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from None
        if set(groups) - {TENANT_GROUP}:
            raise ValueError(f"the only named group of a pattern is {TENANT_GROUP}")
        if self.tenant is not None and TENANT_GROUP in groups:
            raise ValueError("tenant is given twice, by name and by the pattern's group")
        return self

    @field_validator("reply_headers")
    @classmethod
    def _leave_ours_alone(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if name.lower() in OUR_HEADERS:
                raise ValueError(f"reply header {name} is the worker's own")
        return headers

    def allows_reply_to(self, topic: str, tenant: str) -> bool:
        """Whether a prompt of this tenant may name `topic`, by the `reply_prefixes` of the route."""
        for prefix in self.reply_prefixes:
            if TENANT_MARK in prefix and not tenant:
                continue
            name = prefix.replace(TENANT_MARK, tenant)
            if topic == name or topic.startswith(f"{name}."):
                return True
        return False

    @property
    def wire_headers(self) -> tuple[tuple[str, bytes], ...]:
        """The `reply_headers` as they are sent."""
        return tuple((name, text.encode("ascii")) for name, text in self.reply_headers.items())

    def match(self, topic: str) -> "Route | None":
        """This route with its tenant filled in, or None."""
        if self.pattern is None:
            return self if topic in self.topics else None
        found = re.fullmatch(self.pattern, topic)
        if found is None:
            return None
        tenant = found.groupdict().get(TENANT_GROUP)
        return self if tenant is None else self.model_copy(update={"tenant": tenant})


class RouteTable(BaseModel):
    """Routes in order; the first that matches counts. No route writes its answers to a topic that carries prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    routes: Annotated[tuple[Route, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _never_feeds_itself(self) -> Self:
        for route in self.routes:
            if route.output_topic is not None and self.match(route.output_topic) is not None:
                raise ValueError(f"output topic {route.output_topic} carries prompts: the worker would answer itself")
        return self

    @classmethod
    def default(cls, names: TopicNames) -> "RouteTable":
        """One route for each service class."""
        return cls(routes=tuple(Route(topics=(names.prompts(name),), priority=name) for name in PRIORITY_CLASSES))

    def check_names(self, names: TopicNames) -> None:
        """Raise ValueError for a route that would take the worker's own records for prompts."""
        for topic in (names.replies, names.reply_for("request"), names.control, names.dead_letter):
            route = self.match(topic)
            if route is not None:
                raise ValueError(f"route {route.pattern or topic} matches {topic}: the worker would answer itself")

    def match(self, topic: str) -> Route | None:
        """The route of a prompt topic, tenant filled in; None for a topic that carries no prompts."""
        for route in self.routes:
            found = route.match(topic)
            if found is not None:
                return found
        return None

    def is_ordered(self, topic: str) -> bool:
        """Whether the prompts of one key of this topic run one after another."""
        route = self.match(topic)
        return route is not None and route.order == "key"

    @property
    def topics(self) -> frozenset[str]:
        """All topics named without a pattern."""
        return frozenset(topic for route in self.routes for topic in route.topics)
