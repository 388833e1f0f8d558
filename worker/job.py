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
from topics.errors import ErrorCode, InvalidMessage
from topics.headers import ALIASES, DEFAULT_OPERATION, ReplyMode, RequestHeaders, parse_headers
from topics.progress import progress_record
from topics.replies import ReplyContext
from topics.routes import Route
from worker.admission import Held
from worker.broker.api import MessageTooLargeError
from worker.cancel import cancel_record
from worker.deadline import deadline_of
from worker.ended import PromptQuarantined, RequestCancelled, RequestIdConflict, StreamStalled
from worker.envelope import Envelope
from worker.job_services import JobServices
from worker.logs import bound_request, frames_of
from worker.outcome import failure_of
from worker.replies.api import Destination, Failure, Replier, ReplyUndeliverable
from worker.replies.final import FinalReplier
from worker.replies.restarting import RestartingReplier, new_attempt
from worker.replies.sink import BrokerSink
from worker.replies.table import REPLIERS
from worker.shared_runs import RunKey, RunLost, SharedRun
from worker.tally import DUPLICATE, UNDELIVERABLE, Tally
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
        self._tally = Tally(
            services.metrics, services.clock, PriorityClass(route.priority), log_requests=services.log_requests
        )
        self._envelope = Envelope.of(record, route)
        self._destination = services.routes.default(record, self._envelope.salvaged, route, self._envelope.request_id)
        self._attempt = new_attempt()
        self._replier: Replier | None = None
        self._leads: SharedRun | None = None
        self._progress = services.progress.follow(PriorityClass(route.priority), self._tally.began, None)

    async def run(self) -> None:
        told = False
        try:
            with bound_request(self._envelope.request_id, attempt=self._attempt):
                await self._run()
            told = True
        finally:
            self._progress.ended()
            if self._leads is not None:
                self._services.runs.end(self._leads, told=told)
            if self._replier is not None:
                await self._replier.close()

    async def _run(self) -> None:
        try:
            if self._envelope.cancels:
                await self._publish_cancel()
                return
            reason, usage = await self._answer()
            self._tally.ended(reason, usage)
        except Exception as error:  # the job's one boundary: whatever went wrong, a client or the worker is told
            await self._end(error)

    async def _publish_cancel(self) -> None:
        key, value = cancel_record(*self._envelope.cancel_key)
        services = self._services
        services.cancels.cancel(self._envelope.cancel_key)
        place = Destination(services.control_topic, key)
        await BrokerSink(services.producer, place, give_up_seconds=services.limits.reply_give_up_seconds).send(
            (value, ())
        )

    async def _answer(self) -> tuple[str, Usage]:
        services, record, envelope = self._services, self._record, self._envelope
        quotas, tenant, began = services.quotas, envelope.tenant, self._tally.began
        self._destination = await services.routes.resolve(
            record,
            envelope.salvaged,
            envelope.route,
            envelope.request_id,
            tenant=tenant,
            claim=lambda topic: quotas.reply_topic(tenant, topic, began),
        )
        quotas.request(tenant, began)
        if self._quarantined:
            raise PromptQuarantined
        headers = parse_headers(record.headers)
        prompt = await self._off_the_loop(partial(self._decode, headers))
        named = envelope.salvaged.request_id is not None  # a place means another record in a topic that was made anew
        if named and not headers.replay and services.identities.conflicts(*envelope.cancel_key, record.value or b""):
            raise RequestIdConflict(ALIASES["request_id"][0])
        watch = self._watch(headers)
        watch.check()
        if services.cancels.is_cancelled(envelope.cancel_key):
            raise RequestCancelled
        with self._listening(watch):
            if headers.progress and not headers.speaks_spring:
                await self._follow_progress(prompt)
            return await self._run_or_follow(prompt, headers, watch)

    async def _follow_progress(self, prompt: PromptRequest) -> None:
        sink, context = self._sink(), self._context(prompt.operation)
        self._progress = self._services.progress.follow(
            PriorityClass(self._envelope.route.priority),
            self._tally.began,
            lambda event, wait_ms: sink.send(progress_record(context, event, wait_ms)),
        )
        await self._progress.accepted()

    async def _run_or_follow(
        self, prompt: PromptRequest, headers: RequestHeaders, watch: DeltaWatch
    ) -> tuple[str, Usage]:
        """Run, or attach to the equal request that runs here already: it serves an equal route too, another route gets
        the same answer in an attempt of its own. A follower whose run is lost, or held up by the one it answers, runs
        by itself."""
        runs, envelope = self._services.runs, self._envelope
        mode = envelope.reply_mode(headers, stream=prompt.body.stream)
        key = RunKey.of(envelope.tenant, envelope.request_id, prompt.operation, self._record.value or b"")
        salvaged, static = envelope.salvaged, envelope.route.wire_headers
        route = (self._destination, mode, salvaged.correlation_header, salvaged.correlation_id, static)
        held_up = False
        while True:
            request = await self._off_the_loop(partial(self._translate, prompt, headers))
            self._tally.num_prompt_tokens = len(request.prompt_token_ids)
            replier = self._replier = self._make_replier(mode, prompt)
            self._leads = SharedRun(key, route) if held_up else runs.lead(key, route)
            if self._leads is not None:
                longest = len(request.prompt_token_ids) + request.params.n * request.params.max_tokens
                with self._services.quotas.tokens(envelope.tenant, longest):
                    usage = await self._generate(self._services.engine.generate(request), watch, replier)
                return self._tally.finish_reason, usage
            run = runs.running(key)
            if run.route == route:
                if await run.told():
                    return DUPLICATE, Usage(0, 0)
                watch.check()
                continue
            try:
                await self._generate(run.follow(), watch, replier)
                return DUPLICATE, Usage(0, 0)
            except (RunLost, StreamStalled) as error:
                held_up = isinstance(error, StreamStalled)
                await replier.close()
                self._attempt = new_attempt()
                self._tally.begin_again()
                watch.begin_again()

    async def _generate(self, source: AsyncIterator[Delta], watch: DeltaWatch, replier: Replier) -> Usage:
        # closing aborts the request in the engine
        async with aclosing(cast(AsyncGenerator[Delta, None], source)) as deltas:
            while (delta := await watch.next(deltas)) is not None:
                self._tally.add(delta)
                await self._progress.token()
                if self._leads is not None:
                    self._leads.add(delta)
                await replier.send(delta)
        self._progress.ended()
        return await replier.finish()

    async def _off_the_loop(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, unless the record is so small that the way there costs more than the work."""
        size = len(self._record.value or b"")
        packed = self._envelope.salvaged.content_encoding is not None
        return await asyncio.to_thread(work) if packed or size > SMALL_BODY_BYTES else work()

    def _decode(self, headers: RequestHeaders) -> PromptRequest:
        limit = self._services.limits.max_body_bytes
        return decode(self._record.value, headers, request_id=self._envelope.request_id, max_body_bytes=limit)

    def _translate(self, prompt: PromptRequest, headers: RequestHeaders) -> GenerateRequest:
        return translate(
            prompt,
            self._services.engine,
            attempt=self._attempt,
            model_names=self._services.model_names,
            tenant=self._envelope.tenant,
            priority=self._envelope.priority(headers),
            max_output_tokens=self._services.limits.max_output_tokens,
            seed=self._services.seed,
            arrival_seconds=self._tally.began,
            prefill_chunk=self._services.prefill_chunks.choose(
                headers.prefill_chunk, len(self._record.value or b""), self._record.headers
            ),
        )

    def _watch(self, headers: RequestHeaders) -> DeltaWatch:
        limits = self._services.limits
        deadline = deadline_of(self._record, headers, received_ms=self._received_ms, retention_ms=limits.retention_ms)
        return DeltaWatch(
            self._services.clock,
            deadline=None if self._services.clock_check.reason else deadline,
            first_token_seconds=limits.first_token_seconds,
            between_tokens_seconds=limits.between_tokens_seconds,
        )

    @contextmanager
    def _listening(self, watch: DeltaWatch) -> Iterator[None]:
        key = self._envelope.cancel_key
        self._services.cancels.listen(key, watch.cancel)
        try:
            yield
        finally:
            self._services.cancels.forget(key, watch.cancel)
            watch.close()

    def _make_replier(self, mode: ReplyMode, prompt: PromptRequest) -> Replier:
        services, context = self._services, self._context(prompt.operation, prompt.ignored)
        return RestartingReplier(REPLIERS[mode](context, self._sink(), services.clock, services.limits.coalesce))

    def _context(self, operation: str, ignored: tuple[str, ...] = ()) -> ReplyContext:
        return self._envelope.context(
            attempt=self._attempt,
            operation=operation,
            model=self._services.model_names[0],
            created=self._services.clock.wall_ms() // 1000,
            ignored=ignored,
        )

    def _sink(self) -> BrokerSink:
        services = self._services
        producer = services.reply_producers.of(self._destination.topic)
        return BrokerSink(producer, self._destination, give_up_seconds=services.limits.reply_give_up_seconds)

    async def _end(self, error: Exception) -> None:
        """The end of a request without an answer: error reply, and a dead letter for what can never be served."""
        self._progress.ended()
        spent = self._tally.spent
        ours = Usage(0, 0) if self._leads is None else spent
        if isinstance(error, ReplyUndeliverable):
            await self._dead_letter(error)
            self._tally.ended(UNDELIVERABLE, ours)
            return
        failure = failure_of(error)
        if failure is None:
            raise error
        if failure.code is ErrorCode.INTERNAL_ERROR:
            log.error("request failed", error=type(error).__name__, where=frames_of(error))
        if isinstance(error, StreamStalled):
            self._services.metrics.stream_timeout("engine")
        self._services.metrics.error(str(failure.code))
        await self._tell(replace(failure, usage=spent))
        if isinstance(error, InvalidMessage | PromptQuarantined):
            await self._dead_letter(error)
        self._tally.ended(failure.code, ours)

    async def _tell(self, failure: Failure) -> None:
        replier = self._replier or RestartingReplier(FinalReplier(self._context(DEFAULT_OPERATION), self._sink()))
        try:
            await replier.fail(failure)
        except (ReplyUndeliverable, MessageTooLargeError) as error:
            await self._dead_letter(error)

    async def _dead_letter(self, error: Exception) -> None:
        letters = self._services.dead_letters
        await letters.write(self._record, type(error).__name__, str(error), tenant=self._envelope.tenant)
        self._services.metrics.dead_letter()
