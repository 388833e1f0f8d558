"""What each header of a prompt means, in a sentence for the published contract and the reference page."""

from collections.abc import Mapping

HEADER_HELP: Mapping[str, str] = {
    "correlation": "Opaque bytes, at most 1,024; they return under the name they came in.",
    "reply_topic": "Where the answer goes: a topic of the allow-list (`reply_prefixes`).",
    "reply_partition": "Partition of the reply topic, as decimal text or four big-endian bytes.",
    "request_id": "Names the request in replies, cancels and logs; without one `<topic>-<partition>-<offset>`.",
    "operation": "What the body is; `/v1/chat/completions` when not given.",
    "deadline_ms": "Unix milliseconds after which no answer is wanted; stronger than `x-ttl-ms`.",
    "ttl_ms": "The same as milliseconds from the record's timestamp.",
    "tenant": "Whose prompt it is, only where the route has `trust_tenant`; else the route says it.",
    "reply_mode": "`final` (one record), `chunks` (text as it comes), `both`; the route's when not given.",
    "priority": "A class below that of the route; a higher one is not granted.",
    "prefill_chunk": "Tokens of this prompt in one step of the engine.",
    "traceparent": "W3C trace context; it returns with every reply. A bad one is ignored.",
    "content_encoding": "`zstd` where the value is packed; limits count unpacked bytes.",
    "content_type": "`application/json` when not given.",
    "progress": "`1` asks for events `accepted`, `started` and `heartbeat` (`x-event`); not with `kafka_*` headers.",
    "replay": "`1` on a prompt that an operator sends again: what is remembered of its id does not count.",
}
"""Field of `topics.headers.ALIASES` -> its meaning."""
