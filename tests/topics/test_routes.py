"""The route table: which topics carry prompts and what a topic says about them."""

import pytest
from pydantic import ValidationError

from topics.names import TopicNames
from topics.routes import Route, RouteTable


def test_the_default_table_has_a_route_for_each_class() -> None:
    """A prompt topic gives its class; any other topic carries no prompts."""
    table = RouteTable.default(TopicNames())
    route = table.match("v4flash.prompts.bulk")
    assert route is not None
    assert (route.priority, route.tenant, route.reply_mode, route.output_topic) == ("bulk", None, "final", None)
    assert table.match("v4flash.replies") is None
    assert table.topics == set(TopicNames().all_prompts)


def test_a_pattern_gives_the_tenant() -> None:
    """The tenant is the pattern's group; the pattern matches from end to end; the first route wins."""
    table = RouteTable(
        routes=(
            Route(topics=("acme.prompts",), tenant="vip", priority="urgent"),
            Route(pattern=r"(?P<tenant>[a-z]+)\.prompts", priority="bulk", output_topic="answers"),
        )
    )
    first, second = table.match("acme.prompts"), table.match("other.prompts")
    assert first is not None
    assert second is not None
    assert (first.tenant, first.priority) == ("vip", "urgent")
    assert (second.tenant, second.priority, second.output_topic) == ("other", "bulk", "answers")
    assert table.match("other.prompts.reply") is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"topics": ("a",), "pattern": "a"},
        {"pattern": "("},
        {"pattern": "(?P<team>a)"},
        {"pattern": "(?P<tenant>a)", "tenant": "b"},
        {"topics": ("a b",)},
        {"topics": ("a",), "priority": "highest"},
        {"topics": ("a",), "output_topic": "a"},
        {"pattern": "v4.*", "output_topic": "v4.replies"},
        {"topics": ("a",), "colour": "red"},
        {"topics": ("a",), "reply_headers": {"X-Attempt": "1"}},
        {"topics": ("a",), "reply_headers": {"kafka_correlationId": "1"}},
        {"topics": ("a",), "reply_headers": {"kafka_nest-err": "1"}},
        {"topics": ("a",), "reply_headers": {"two words": "1"}},
        {"topics": ("a",), "reply_headers": {"empty": ""}},
        {"topics": ("a",), "reply_headers": {"binary": "\x00"}},
        {"topics": ("a",), "reply_headers": {"number": 1}},
        {"topics": ("a",), "reply_headers": {str(name): "1" for name in range(17)}},
    ],
)
def test_a_table_that_cannot_work_is_refused(fields: dict[str, object]) -> None:
    """Settings fail at start, above all a route that would feed on its own answers."""
    with pytest.raises(ValidationError):
        RouteTable.model_validate({"routes": [fields]})


def test_an_order_is_that_of_a_route_and_one_that_nobody_keeps_is_refused() -> None:
    """`order: key` holds for the topics of its route and for no others."""
    table = RouteTable(routes=(Route(topics=("a",), order="key"), Route(topics=("b",))))
    assert [table.is_ordered(topic) for topic in ("a", "b", "c")] == [True, False, False]
    with pytest.raises(ValueError, match="order"):
        Route.model_validate({"topics": ["a"], "order": "arrival"})


@pytest.mark.parametrize(
    "pattern", [r"v4flash\..+", r"v4flash\.replies\.[a-z]+", r".*dead-letter", r"v4flash\.control"]
)
def test_a_route_over_the_workers_own_records_is_refused(pattern: str) -> None:
    """Its replies, cancels and dead letters would come back as prompts."""
    table = RouteTable(routes=(Route(pattern=pattern),))
    with pytest.raises(ValueError, match="would answer itself"):
        table.check_names(TopicNames())


def test_the_default_routes_take_none_of_the_workers_own_records() -> None:
    """Also below another prefix."""
    RouteTable.default(TopicNames("acme")).check_names(TopicNames("acme"))


def test_reply_prefixes_of_a_route_end_at_a_dot_and_stand_for_the_tenant() -> None:
    """No tenant reaches a topic of one whose name begins as its own; without a tenant its marks allow nothing."""
    route = Route(pattern="jobs-(?P<tenant>[a-z]+)", reply_prefixes=("answers.{tenant}", "shared"))
    allowed = ["answers.acme", "answers.acme.r1", "shared", "shared.r1"]
    refused = ["answers.acme2", "answers", "answers.other", "answers.", "sharedx", "answers.acme-2"]
    assert [topic for topic in allowed + refused if route.allows_reply_to(topic, "acme")] == allowed
    assert not route.allows_reply_to("answers.", "")
    with pytest.raises(ValueError, match="reply_prefixes"):
        Route(topics=("a",), reply_prefixes=("answers/{tenant}",))
