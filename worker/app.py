"""The worker: wires broker, engine and jobs together, and takes them apart again.

The life of a request:

1. `intake.Intake` polls a record from the class whose turn it is; `offsets.OffsetTracker.started`.
2. `job.Job` finds where replies go (`replies.routes`) and reads the value (`topics.codec`).
3. Admission: identity, deadline, cancel; a refusal is an error reply, and for a broken record a dead letter.
4. `translate` makes the engine's request and asks whether it can ever run.
5. `GenerationEngine.generate` streams deltas; `watch.DeltaWatch` holds deadline, stall limits and cancel.
6. A replier (`replies.table`) turns deltas into records; the terminal record is awaited.
7. `OffsetTracker.finished`; `committer.Committer` commits the contiguous watermark.
"""

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import structlog

from engine.api import GenerationEngine, PriorityClass
from worker.backlog import Backlog, BacklogWatch
from worker.backpressure import Backpressure
from worker.broker.api import Broker, Record
from worker.cancel import CancelBook
from worker.client_lifecycle import LEAVE_SECONDS, bounded, started, unless
from worker.clock import Clock
from worker.clock_check import ClockCheck
from worker.control import ControlReader
from worker.dead_letter import DeadLetterPolicy, DeadLetters
from worker.fair_queue import FairQueue
from worker.handover import Handover, NoHandover
from worker.identities import Identities
from worker.intake import Intake
from worker.job_services import JobLimits, JobServices
from worker.lease import Answered, parse_done
from worker.membership import Membership
from worker.metrics import Metrics
from worker.prefill_chunk import PrefillChunks
from worker.progress import ProgressBook
from worker.quotas import Quotas
from worker.renewing_producer import ResendingProducer
from worker.replies.producers import ReplyProducers
from worker.replies.routes import ReplyRoutes
from worker.running_jobs import RunningJobs
from worker.settings import Settings
from worker.shared_runs import SharedRuns

log = structlog.get_logger(__name__)


class WorkerApp:
    """One member of the group. `run` may be called once."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        engine: GenerationEngine,
        clock: Clock,
        metrics: Metrics | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._metrics = metrics or Metrics()
        self._names = settings.names
        self._routes = settings.route_table
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._handing_over = False
        self._jobs: RunningJobs | None = None
        self._classes: dict[str, PriorityClass] = {}
        own_topics = (
            self._names.own | {self._names.replies} | {r.output_topic for r in self._routes.routes if r.output_topic}
        )
        self._producers = ReplyProducers(broker.producer, own_topics)
        self._producer = ResendingProducer(self._producers.own)
        self._admin = broker.admin()
        self._control = broker.reader([self._names.control], from_beginning=True)
        self._cancels = CancelBook()
        self._clock_check = ClockCheck(self._producer, self._names.control, clock)
        self._follower = ControlReader(self._control, (self._cancels.take, self._take_done, self._clock_check.take))
        self.member = Membership(settings, self._routes, broker, self._admin, clock, engine.flight)
        self._progress = ProgressBook(clock, heartbeat_seconds=settings.progress_heartbeat_seconds)
        self._backlog = Backlog(self.member.tracker)
        self._intake = Intake(
            self.member.subscription,
            self.member.assignment,
            self.member.tracker,
            self.member.admission,
            self._backlog,
            queue=FairQueue(settings.class_weights),
            backpressure=Backpressure(settings.thresholds, dwell_seconds=settings.backpressure_dwell_seconds),
            stats=engine.stats,
            class_of=self._class_of,
            committer=self.member.committer,
            max_inflight_requests=settings.max_inflight_requests,
            clock=clock,
            metrics=self._metrics,
        )

    @property
    def unready(self) -> str | None:
        """Why prompts are not taken, from all partitions or from some; None when all is well."""
        if not self._engine.health.ready:
            return self._engine.health.reason or "the engine is not ready"
        if self._stop.is_set():
            return "stopping"
        return self.member.assignment.unready or self._follower.unready or self._clock_check.reason

    @property
    def ready(self) -> bool:
        """Whether prompts are being taken."""
        return self.unready is None

    @property
    def stalled(self) -> str | None:
        """Why the process should be restarted; None while every partition that is asked moves on."""
        return self.member.watchdog.reason

    def request_stop(self, *, at_once: bool = False) -> None:
        """Stop taking prompts; `run` returns when what runs has ended, or the grace has. With `at_once` the grace is
        over now, and the broker gets a second to take the last commit. Idempotent."""
        self._stop.set()
        if at_once:
            self._hurry.set()
            if self._jobs is not None:
                self._jobs.abort()

    def request_hand_over(self) -> None:
        """Leave the group now, with leases on what runs, and answer that: it has `lease_seconds`."""
        self._handing_over = True
        self._stop.set()

    def answered_elsewhere(self, told: Answered) -> None:
        """Another process has dealt with this prompt."""
        if self.member.answered_elsewhere(told):
            self._intake.changed()

    def left_behind(self) -> None:
        """The process that was answering what we left alone has gone."""
        self.member.admission.left_behind()
        self._intake.changed()

    async def run(self, *, until_end: bool = False, handover: Handover | None = None) -> None:
        """Serve until `request_stop`, or with `until_end` until what was there at the start is answered and committed.

        Raises what makes serving impossible (dead engine, broker out of reach); unfinished prompts stay uncommitted.
        """
        handover = handover or NoHandover()
        self._jobs = jobs = RunningJobs(
            self._services(patient=not until_end),
            self._routes,
            self.member.tracker,
            self.member.committer,
            released=self._intake.released,
            answered=handover.answered,
            lease_seconds=self._settings.lease_seconds,
        )
        backlog = BacklogWatch(
            self._backlog, self.member.assignment, self.member.subscription, self._admin, self._clock, self._metrics
        )
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(self._leave)
            if not await unless(self._stop, self._start(handover)):
                return
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work)
                    for work in (
                        self._announce(handover),
                        self._follower.run(),
                        self._clock_check.run(),
                        self.member.committer.run(),
                        self.member.subscription.run(),
                        self.member.watchdog.run(self.member.subscription),
                        backlog.run(),
                        self._progress.run(),
                        self._producers.own.run(),
                        self._producers.named.run(),
                    )
                ]
                async with asyncio.TaskGroup() as group:
                    await self._intake.run(partial(jobs.start, group), stop=self._stop, until_end=until_end)
                    grace = None if until_end and not self._stop.is_set() else self._settings.grace_seconds
                    if self._handing_over:
                        grace = self._settings.lease_seconds
                        running = jobs.prompts  # before the commit: whatever ends after it is told
                        await bounded(self.member.subscription.hand_over, LEAVE_SECONDS, self._hurry)
                        handover.handed_over(running)
                    await jobs.drain(grace)
                for task in background:
                    task.cancel()
            self.member.tracker.given_up()
            await self.member.commit_at_last(self._hurry, must=until_end and not self._stop.is_set())

    async def _start(self, handover: Handover) -> None:
        """Everything until the group is joined."""
        if not self._engine.health.ready:
            await self._engine.start()
            log.info("model loaded", model=self._engine.model.name, kernels=self._engine.model.kernels)
        self.member.admission.leave_alone(await handover.may_join())
        for client in (self._admin, self._producers.own, self._producers.named, self._control):
            await started(client)
        self.member.codec.bind(await self._admin.cluster_id())
        await self._clock_check.ask()
        await self._follower.catch_up()
        await started(self.member.subscription)

    async def _leave(self) -> None:
        """Give the broker and the engine up, each within its time."""
        await bounded(self._engine.close, LEAVE_SECONDS, self._hurry)
        clients = (self._control, self._producers.named, self._producers.own, self.member.subscription, self._admin)
        await asyncio.gather(*(bounded(client.stop, LEAVE_SECONDS, self._hurry) for client in clients))

    def _take_done(self, record: Record) -> None:
        told = parse_done(record)
        if told is not None:
            self.answered_elsewhere(told)

    async def _announce(self, handover: Handover) -> None:
        """Say once that prompts are taken."""
        await self.member.assignment.known.wait()
        handover.serving()
        log.info("taking prompts", group_id=self._settings.group_id, num_partitions=len(self.member.assignment.open))

    def _class_of(self, topic: str) -> PriorityClass:
        if topic not in self._classes:  # asked for every partition before every poll
            route = self._routes.match(topic)
            self._classes[topic] = PriorityClass.STANDARD if route is None else PriorityClass(route.priority)
        return self._classes[topic]

    def _services(self, *, patient: bool) -> JobServices:
        settings, names = self._settings, self._names
        give_up = settings.reply_give_up_seconds
        return JobServices(
            engine=self._engine,
            producer=self._producer,
            reply_producers=self._producers,
            routes=ReplyRoutes(
                self._admin,
                names,
                allowed_prefixes=settings.allowed_reply_prefixes,
                forbidden=names.own | self._routes.topics,
                carries_prompts=lambda topic: self._routes.match(topic) is not None,
                clock=self._clock,
                give_up_seconds=give_up,
            ),
            dead_letters=DeadLetters(
                self._producer,
                names.dead_letter,
                give_up_seconds=give_up,
                policy=DeadLetterPolicy(settings.dead_letter_dialect, settings.dead_letter_values),
                stuck=self.member.assignment.stuck if patient else None,
            ),
            cancels=self._cancels,
            identities=Identities(),
            runs=SharedRuns(),
            progress=self._progress,
            quotas=Quotas(settings.tenant_quotas),
            prefill_chunks=PrefillChunks.of_setting(settings.prefill_chunk_hook),
            control_topic=names.control,
            clock=self._clock,
            clock_check=self._clock_check,
            metrics=self._metrics,
            limits=JobLimits.of(settings),
            served_model_names=settings.served_model_names,
            seed=settings.seed,
            log_requests=not settings.disable_log_requests,
        )
