"""What a prompt record says beside its body: who asks, under which id, and how the answer is to be addressed."""

from dataclasses import dataclass

from engine.api import PriorityClass
from topics.headers import ReplyMode, RequestHeaders, salvage_headers
from topics.replies import ReplyContext
from topics.routes import Route
from worker.broker.api import Record
from worker.cancel import CancelKey


@dataclass(frozen=True, slots=True)
class Envelope:
    """`salvaged` is what can be read of the headers, so that an error finds its client also where one is refused."""

    record: Record
    route: Route
    salvaged: RequestHeaders
    request_id: str
    tenant: str

    @classmethod
    def of(cls, record: Record, route: Route) -> "Envelope":
        """A record that names no id is called after its place."""
        salvaged = salvage_headers(record.headers)
        request_id = salvaged.request_id or f"{record.topic}-{record.partition}-{record.offset}"
        tenant = (salvaged.tenant if route.trust_tenant else None) or route.tenant or ""
        return cls(record, route, salvaged, request_id, tenant)

    @property
    def cancel_key(self) -> CancelKey:
        return self.tenant, self.request_id

    @property
    def cancels(self) -> bool:
        """Whether the record asks to stop a request instead of making one."""
        return self.record.value is None and self.salvaged.request_id is not None

    def reply_mode(self, headers: RequestHeaders, *, stream: bool) -> ReplyMode:
        if headers.reply_mode is not None:
            return headers.reply_mode
        return "chunks" if stream and not headers.speaks_spring else self.route.reply_mode

    def priority(self, headers: RequestHeaders) -> PriorityClass:
        """The class of the route, or the lower one that is asked for."""
        classes = list(PriorityClass)
        ours = PriorityClass(self.route.priority)
        asked = ours if headers.priority is None else PriorityClass(headers.priority)
        return max(asked, ours, key=classes.index)

    def context(
        self, *, attempt: str, operation: str, model: str, created: int, ignored: tuple[str, ...] = ()
    ) -> ReplyContext:
        """What all replies of one attempt carry; `created` is Unix seconds."""
        return ReplyContext(
            request_id=self.request_id,
            attempt=attempt,
            operation=operation,
            model=model,
            created=created,
            correlation_header=self.salvaged.correlation_header,
            correlation_id=self.salvaged.correlation_id,
            traceparent=self.salvaged.traceparent,
            ignored=ignored,
            nest_text_ids=self.salvaged.nest_text_ids,
            static_headers=self.route.wire_headers,
        )
