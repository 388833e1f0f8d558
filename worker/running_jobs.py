"""The jobs that run: each from its start to the offset it settles. Knows neither polling nor what a job does."""

import asyncio
from collections.abc import Callable

import structlog

from topics.routes import RouteTable
from worker.admission import Start
from worker.broker.api import BrokerError, Record
from worker.committer import Committer
from worker.job import Job
from worker.job_services import JobServices
from worker.lease import Answered, done_record
from worker.offsets import OffsetTracker

log = structlog.get_logger(__name__)


class RunningJobs:
    """An offset is finished when its job returns, and stays for redelivery when the job raises or is aborted.

    `released` is called at each end. Whoever owns the partition by then is told within `lease_seconds`, and `answered`
    is called at once.
    """

    def __init__(
        self,
        services: JobServices,
        routes: RouteTable,
        tracker: OffsetTracker,
        committer: Committer,
        *,
        released: Callable[[Record], None],
        answered: Callable[[Answered], None],
        lease_seconds: float,
    ) -> None:
        self._services = services
        self._routes = routes
        self._tracker = tracker
        self._committer = committer
        self._released = released
        self._answered = answered
        self._lease_seconds = lease_seconds
        self._tasks: dict[asyncio.Task[None], Record] = {}
        self._aborted = False

    @property
    def prompts(self) -> list[Answered]:
        """What is not dealt with yet."""
        return [Answered.of(record) for record in self._tasks.values()]

    def start(self, group: asyncio.TaskGroup, start: Start, log_number: int) -> None:
        """Run a job in `group`; `log_number` is from `OffsetTracker.started`."""
        task = group.create_task(self._run(start, log_number))
        self._tasks[task] = start.held.record
        task.add_done_callback(self._tasks.pop)

    async def drain(self, grace_seconds: float | None) -> None:
        """Wait for the running jobs; those that outlive the grace are aborted and stay for redelivery."""
        running = tuple(self._tasks)
        if not running:
            return
        log.info("draining", num_requests=len(running))
        if not self._aborted:
            await asyncio.wait(running, timeout=grace_seconds)
        self._cancel()

    def abort(self) -> None:
        """The grace ends now."""
        self._aborted = True
        self._cancel()

    def _cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _run(self, start: Start, log_number: int) -> None:
        record, flight, now = start.held.record, self._services.engine.flight, self._services.clock.now
        place = f"{record.topic}:{record.partition}:{record.offset}"
        flight.record("start", now(), prompt=place, alone=int(start.alone), quarantined=int(start.quarantined))
        route = self._routes.match(record.topic)
        assert route is not None, record.topic
        try:
            await Job(self._services, start.held, route, quarantined=start.quarantined).run()
            self._tracker.finished(record.tp, record.offset, log_number)
            self._committer.progressed()
            if not self._tracker.is_assigned(record.tp):
                self._answered(Answered.of(record))
                await self._tell_new_owner(record)
        finally:
            flight.record("end", now(), prompt=place)
            self._released(record)

    async def _tell_new_owner(self, record: Record) -> None:
        key, value = done_record(record)
        try:
            async with asyncio.timeout(self._lease_seconds):
                await self._services.producer.send(self._services.control_topic, value, key=key)
        except (BrokerError, TimeoutError) as error:  # its lease runs out, and the prompt is answered twice
            log.warning("the new owner was not told of an answer", error=type(error).__name__)
