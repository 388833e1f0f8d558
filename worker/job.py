"""One prompt record from its bytes to its terminal record. The one place that turns exceptions into replies."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import structlog

from engine.api import Delta, GenerateRequest, PriorityClass, Usage
from topics.codec import PromptRequest, decode
from topics.errors import InvalidMessage
from topics.headers import DEFAULT_OPERATION, ReplyMode, RequestHeaders, parse_headers, salvage_headers
from topics.replies import ReplyContext
from topics.routes import Route
from worker.admission import Held
from worker.broker.api import MessageTooLargeError
from worker.cancel import cancel_record
from worker.deadline import deadline_ms
from worker.ended import PromptQuarantined, RequestCancelled, RequestIdConflict, StreamStalled
from worker.job_services import JobServices
from worker.logs import bound_request
from worker.outcome import failure_of
from worker.replies.api import Destination, Failure, Replier, ReplyUndeliverable
from worker.replies.final import FinalReplier
from worker.replies.restarting import RestartingReplier, new_attempt
from worker.replies.sink import BrokerSink
from worker.replies.table import REPLIERS
from worker.shared_runs import RunKey, RunLost, SharedRun
from worker.translate import translate
from worker.watch import DeltaWatch

SMALL_BODY_BYTES = 4096

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Job:
    """`run` returns when the record is dealt with: its terminal record, dead letter or cancel is acknowledged.

    It raises, with nothing terminal sent, when the engine is dead, the broker is out of reach or the job is cancelled:
    such a record must stay uncommitted.
    """

    def __init__(self, services: JobServices, held: Held, route: Route, *, quarantined: bool = False) -> None:
        self._services = services
        self._record = record = held.record
        self._received_ms = held.received_ms
        self._quarantined = quarantined
        self._route = route
        self._priority = held.priority
        self._began = services.clock.now()
        self._first_token: float | None = None
        self._headers = salvage_headers(record.headers)
        self._request_id = self._headers.request_id or f"{record.topic}-{record.partition}-{record.offset}"
        self._tenant = (self._headers.tenant if route.trust_tenant else None) or route.tenant or ""
        self._destination = services.routes.default(record, self._headers, route, self._request_id)
        self._attempt = new_attempt()
        self._replier: Replier | None = None
        self._leads: SharedRun | None = None
        self._num_prompt = self._num_generated = 0

    async def run(self) -> None:
        told = False
        try:
            with bound_request(self._request_id, attempt=self._attempt):
                await self._run()
            told = True
        finally:
            if self._leads is not None:
                self._services.runs.end(self._leads, told=told)
            if self._replier is not None:
                await self._replier.close()

    async def _run(self) -> None:
        try:
            if self._record.value is None and self._headers.request_id is not None:
                await self._publish_cancel()
                return
            reason, usage = await self._answer()
            self._observe(reason, usage)
        except Exception as error:
            await self._end(error)

    async def _publish_cancel(self) -> None:
        key, value = cancel_record(self._tenant, self._request_id)
        self._services.cancels.cancel((self._tenant, self._request_id))
        await self._services.producer.send(self._services.control_topic, value, key=key)

    async def _answer(self) -> tuple[str, Usage]:
        services, record = self._services, self._record
        self._destination = await services.routes.resolve(record, self._headers, self._route, self._request_id)
        if self._quarantined:
            raise PromptQuarantined
        headers = parse_headers(record.headers)
        prompt = await self._off_the_loop(partial(self._decode, headers))
        if not headers.replay and services.identities.conflicts(self._tenant, self._request_id, record.value or b""):
            raise RequestIdConflict
        watch = self._watch(headers)
        watch.check()
        if services.cancels.is_cancelled((self._tenant, self._request_id)):
            raise RequestCancelled
        with self._listening(watch):
            return await self._run_or_follow(prompt, headers, watch)

    async def _run_or_follow(
        self, prompt: PromptRequest, headers: RequestHeaders, watch: DeltaWatch
    ) -> tuple[str, Usage]:
        """Run, or attach to the equal request that runs here already: it serves an equal route too, another route gets
        the same answer in an attempt of its own. A follower whose run is lost runs by itself."""
        runs, mode = self._services.runs, self._reply_mode(prompt, headers)
        key = RunKey.of(self._tenant, self._request_id, prompt.operation, self._record.value or b"")
        route = (self._destination, mode, self._headers.correlation_header, self._headers.correlation_id)
        while True:
            request = await self._off_the_loop(partial(self._translate, prompt, headers))
            self._num_prompt = len(request.prompt_token_ids)
            replier = self._replier = self._make_replier(mode, prompt)
            self._leads = runs.lead(key, route)
            if self._leads is not None:
                usage = await self._generate(self._services.engine.generate(request), watch, replier)
                return "done", usage
            run = runs.running(key)
            if run.route == route:
                if await run.told():
                    return "duplicate", Usage(0, 0)
                watch.check()
                continue
            try:
                await self._generate(run.follow(), watch, replier)
                return "duplicate", Usage(0, 0)
            except RunLost:
                await replier.close()
                self._attempt = new_attempt()

    async def _generate(self, source: AsyncIterator[Delta], watch: DeltaWatch, replier: Replier) -> Usage:
        # closing aborts the request in the engine
        async with aclosing(cast(AsyncGenerator[Delta, None], source)) as deltas:
            while (delta := await watch.next(deltas)) is not None:
                if self._first_token is None:
                    self._first_token = self._services.clock.now() - self._began
                self._num_generated += len(delta.token_ids)
                if self._leads is not None:
                    self._leads.add(delta)
                await replier.send(delta)
        return await replier.finish()

    async def _off_the_loop(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, unless the record is so small that the way there costs more than the work."""
        size = len(self._record.value or b"")
        packed = self._headers.content_encoding is not None
        return await asyncio.to_thread(work) if packed or size > SMALL_BODY_BYTES else work()

    def _decode(self, headers: RequestHeaders) -> PromptRequest:
        limit = self._services.limits.max_body_bytes
        return decode(self._record.value, headers, request_id=self._request_id, max_body_bytes=limit)

    def _translate(self, prompt: PromptRequest, headers: RequestHeaders) -> GenerateRequest:
        classes = list(PriorityClass)
        asked = self._priority if headers.priority is None else PriorityClass(headers.priority)
        return translate(
            prompt,
            self._services.engine,
            attempt=self._attempt,
            tenant=self._tenant,
            priority=max(asked, self._priority, key=classes.index),
            max_output_tokens=self._services.limits.max_output_tokens,
            arrival_seconds=self._began,
        )

    def _watch(self, headers: RequestHeaders) -> DeltaWatch:
        clock, limits = self._services.clock, self._services.limits
        now_ms = clock.wall_ms()
        until = deadline_ms(self._record, headers, received_ms=self._received_ms, retention_ms=limits.retention_ms)
        return DeltaWatch(
            clock,
            deadline=None if until is None else clock.now() + (until - now_ms) / 1000,
            first_token_seconds=limits.first_token_seconds,
            between_tokens_seconds=limits.between_tokens_seconds,
        )

    @contextmanager
    def _listening(self, watch: DeltaWatch) -> Iterator[None]:
        key = (self._tenant, self._request_id)
        self._services.cancels.listen(key, watch.cancel)
        try:
            yield
        finally:
            self._services.cancels.forget(key, watch.cancel)
            watch.close()

    def _reply_mode(self, prompt: PromptRequest, headers: RequestHeaders) -> ReplyMode:
        if headers.reply_mode is not None:
            return headers.reply_mode
        return "chunks" if prompt.body.stream and not headers.speaks_spring else self._route.reply_mode

    def _make_replier(self, mode: ReplyMode, prompt: PromptRequest) -> Replier:
        services = self._services
        context = self._context(prompt.operation, prompt.ignored)
        sink = self._sink(self._destination)
        replier = REPLIERS[mode](context, sink, services.clock, services.limits.coalesce)
        return RestartingReplier(replier)

    def _context(self, operation: str, ignored: tuple[str, ...] = ()) -> ReplyContext:
        return ReplyContext(
            request_id=self._request_id,
            attempt=self._attempt,
            operation=operation,
            model=self._services.engine.model.name,
            created=self._services.clock.wall_ms() // 1000,
            correlation_header=self._headers.correlation_header,
            correlation_id=self._headers.correlation_id,
            traceparent=self._headers.traceparent,
            ignored=ignored,
            nest_text_ids=self._headers.nest_text_ids,
        )

    def _sink(self, destination: Destination) -> BrokerSink:
        services = self._services
        producer = services.reply_producers.of(destination.topic)
        return BrokerSink(producer, destination, give_up_seconds=services.limits.reply_give_up_seconds)

    async def _end(self, error: Exception) -> None:
        """The end of a request without an answer: error reply, and a dead letter for what can never be served."""
        if isinstance(error, ReplyUndeliverable):
            await self._dead_letter(error)
            return
        failure = failure_of(error)
        if failure is None:
            raise error
        log.info("request failed", request_id=self._request_id, code=str(failure.code), exc_info=_unexpected(error))
        if isinstance(error, StreamStalled):
            self._services.metrics.stream_timeout("engine")
        self._services.metrics.error(str(failure.code))
        spent = Usage(self._num_prompt, self._num_generated)
        await self._tell(replace(failure, usage=spent))
        if isinstance(error, InvalidMessage | PromptQuarantined):
            await self._dead_letter(error)
        self._observe(str(failure.code), Usage(0, 0) if self._leads is None else spent)

    async def _tell(self, failure: Failure) -> None:
        replier = self._replier or RestartingReplier(
            FinalReplier(self._context(DEFAULT_OPERATION), self._sink(self._destination))
        )
        try:
            await replier.fail(failure)
        except (ReplyUndeliverable, MessageTooLargeError) as error:
            await self._dead_letter(error)

    async def _dead_letter(self, error: Exception) -> None:
        letters = self._services.dead_letters
        await letters.write(self._record, type(error).__name__, str(error), tenant=self._tenant)
        self._services.metrics.dead_letter()

    def _observe(self, reason: str, usage: Usage) -> None:
        seconds = self._services.clock.now() - self._began
        self._services.metrics.request_finished(
            self._priority, reason, seconds, self._first_token, usage.prompt_tokens, usage.completion_tokens
        )


def _unexpected(error: Exception) -> Exception | None:
    failure = failure_of(error)
    return error if failure is not None and failure.code == "internal_error" else None
