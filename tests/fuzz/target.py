"""What every record must survive. A record is written as in HTTP: `name: value` lines, an empty line, the body.

A line without a colon is a header without a value; a body of `null` alone is a record without a value.
"""

import json

from topics.attempts import AttemptReader
from topics.codec import decode
from topics.errors import ErrorCode, InvalidMessage
from topics.headers import WireHeaders, parse_headers
from topics.names import TopicNames, validate_reply_topic
from topics.replies import error_record
from topics.routes import Route
from worker.broker.api import Record, TopicPartition
from worker.cancel import parse_cancel
from worker.commit_metadata import MetadataCodec
from worker.dead_letter import dead_letter_headers
from worker.deadline import deadline_of
from worker.envelope import Envelope
from worker.lease import parse_done
from worker.letter import parse_letter, shown

LIMIT = 64 << 10
PLACE = TopicPartition("v4flash.prompts.bulk", 0)
ROUTE = Route(topics=(PLACE.topic,), trust_tenant=True)


def record_of(data: bytes) -> tuple[WireHeaders, bytes | None]:
    """Headers and value of one input."""
    head, _, body = data.partition(b"\n\n")
    headers = []
    for line in head.split(b"\n"):
        name, colon, value = line.partition(b":")
        if name:
            headers.append((name.decode("utf-8", "replace"), value.removeprefix(b" ") if colon else None))
    return tuple(headers), None if body.strip() == b"null" else body


def check(data: bytes) -> None:
    """Whatever the bytes: a request or an InvalidMessage, a reply that can be sent, a dead letter that can be read."""
    headers, value = record_of(data)
    record = Record(*PLACE, 7, 1_700_000_000_000, None, value, headers)
    envelope = Envelope.of(record, ROUTE)
    context = envelope.context(attempt="a", operation="/v1/chat/completions", model="m", created=0)
    try:
        parsed = parse_headers(headers)
        deadline_of(record, parsed, received_ms=1_700_000_000_000, retention_ms=86_400_000)
        if parsed.reply_topic is not None and parsed.reply_topic_header is not None:
            names = TopicNames()
            validate_reply_topic(
                parsed.reply_topic,
                header=parsed.reply_topic_header,
                allowed_prefixes=names.reply_prefixes,
                forbidden=names.own,
            )
        request = decode(value, parsed, request_id=envelope.request_id, max_body_bytes=LIMIT)
        message, code, param = ",".join(request.ignored), ErrorCode.CANCELLED, None
        envelope.reply_mode(parsed, stream=request.body.stream)
        envelope.priority(parsed)
    except InvalidMessage as error:
        assert error.message
        message, code, param = error.message, error.code, error.param
    body, reply_headers = error_record(context, 0, code=code, message=message, param=param)
    json.loads(body)
    AttemptReader().feed(reply_headers, body, 0)
    AttemptReader().feed(headers, value, 0)
    written = Record(*PLACE, 7, 0, None, value, dead_letter_headers(record, "InvalidMessage", message, "both"))
    letter = parse_letter(written)
    assert (letter.topic, letter.partition, letter.offset) == (*PLACE, 7)
    json.loads(shown(letter))
    parse_letter(record)
    parse_cancel(record)
    parse_done(record)
    MetadataCodec().decode(PLACE, (value or b"").decode("latin-1"), base=0, end=100)
