"""Topic names, the allow-list of reply topics, and printable ids."""

import uuid

import pytest

from topics.errors import InvalidMessage
from topics.headers import parse_headers, printable_id, salvage_headers
from topics.names import PRIORITY_CLASSES, TopicNames, validate_reply_topic

NAMES = TopicNames()
HEADER = "kafka_replyTopic"


def test_names_hang_below_the_prefix() -> None:
    """The layout that clients and operators rely on."""
    assert NAMES.all_prompts == ("v4flash.prompts.urgent", "v4flash.prompts.standard", "v4flash.prompts.bulk")
    assert (NAMES.control, NAMES.replies, NAMES.dead_letter) == (
        "v4flash.control",
        "v4flash.replies",
        "v4flash.dead-letter",
    )
    assert TopicNames("x").prompts("bulk") == "x.prompts.bulk"
    assert PRIORITY_CLASSES == ("urgent", "standard", "bulk")


@pytest.mark.parametrize("request_id", ["a b", "x" * 129, "🙂", "a/b", "\ud800"])
def test_a_request_id_that_is_no_topic_name_is_hashed(request_id: str) -> None:
    """The topic of a request is always valid and in the allow-list."""
    assert NAMES.reply_for("job-1.a_B") == "v4flash.replies.job-1.a_B"
    topic = NAMES.reply_for(request_id)
    assert len(topic) == len("v4flash.replies.") + 64
    assert (
        validate_reply_topic(topic, header=HEADER, allowed_prefixes=NAMES.reply_prefixes, forbidden=NAMES.own) == topic
    )


@pytest.mark.parametrize("topic", ["v4flash.replies", "v4flash.replies.team-a", "v4flash.prompts.urgent.reply"])
def test_allowed_reply_topics_pass(topic: str) -> None:
    """The defaults fit NestJS and Spring."""
    assert (
        validate_reply_topic(topic, header=HEADER, allowed_prefixes=NAMES.reply_prefixes, forbidden=NAMES.own) == topic
    )
    assert validate_reply_topic(topic, header=HEADER, allowed_prefixes=["v4flash.*"], forbidden=NAMES.own) == topic


@pytest.mark.parametrize(
    "topic",
    [
        "",
        ".",
        "..",
        "a b",
        "v4flash.replies/x",
        "v4flash.replies\n",
        "v4flash.repliés",
        "__consumer_offsets",
        "_x",
        "v4flash.replies." + "x" * 250,
        "payments",
        *NAMES.own,
    ],
)
def test_a_forbidden_reply_topic_is_refused_even_where_every_prefix_is_allowed(topic: str) -> None:
    """Our credentials write only where the client may, and never into our own prompts."""
    for prefixes in ([*NAMES.reply_prefixes], ["*"]):
        if topic == "payments" and prefixes == ["*"]:
            continue
        with pytest.raises(InvalidMessage) as refused:
            validate_reply_topic(topic, header=HEADER, allowed_prefixes=prefixes, forbidden=NAMES.own)
        assert (refused.value.code, refused.value.param) == ("invalid_reply_topic", HEADER)
        assert refused.value.message.startswith(f"{HEADER}: ")


def test_a_reply_topic_of_bad_bytes_is_left_for_the_topic_check() -> None:
    """Its error is the one about reply topics, by the header that was sent."""
    headers = parse_headers((("Reply_To", b"v4flash.replies\xff\n"),))
    assert headers.reply_topic is not None and headers.reply_topic_header == "Reply_To"
    with pytest.raises(InvalidMessage, match="Reply_To: the reply topic"):
        validate_reply_topic(
            headers.reply_topic, header=headers.reply_topic_header, allowed_prefixes=["*"], forbidden=NAMES.own
        )


def test_salvaged_headers_still_find_the_client() -> None:
    """One bad header does not hide where the error has to go."""
    headers = (("x-ttl-ms", b"soon"), ("kafka_correlationId", b"c1"), ("kafka_replyTopic", b"v4flash.replies"))
    with pytest.raises(InvalidMessage):
        parse_headers(headers)
    salvaged = salvage_headers(headers)
    assert (salvaged.correlation_id, salvaged.reply_topic, salvaged.ttl_ms) == (b"c1", "v4flash.replies", None)


def test_ids_are_printable_in_logs() -> None:
    """Text as itself, sixteen other bytes as a UUID, the rest as hex."""
    some = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
    assert printable_id("größe-1".encode()) == "größe-1"
    assert printable_id(some.bytes) == str(some)
    assert printable_id(b"\x00\x01") == "0001"
    assert printable_id(b"a\nb") == "610a62"
