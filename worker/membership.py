"""What makes this process a member of its group: what it holds, what of that is done, and what the broker was told."""

import asyncio
from functools import partial

import structlog

from engine.flight import FlightRecorder
from topics.routes import RouteTable
from worker.admission import Admission, AdmissionPolicy
from worker.assignment import Assignment
from worker.broker.api import Admin, Broker, BrokerError, BrokerUnavailableError
from worker.client_lifecycle import LEAVE_SECONDS, bounded
from worker.clock import Clock
from worker.commit_metadata import MetadataCodec
from worker.committer import Committer
from worker.lease import Answered, AnsweredBook
from worker.offsets import OffsetTracker
from worker.settings import Settings
from worker.subscription import Subscription
from worker.watchdog import Watchdog

log = structlog.get_logger(__name__)


class Membership:
    """The parts that know offsets, wired to each other. Nothing is asked of the broker before `subscription.start`."""

    def __init__(
        self, settings: Settings, routes: RouteTable, broker: Broker, admin: Admin, clock: Clock, flight: FlightRecorder
    ) -> None:
        self._answered = AnsweredBook()
        self._grace_seconds = settings.grace_seconds
        self.tracker = OffsetTracker(max_inflight_per_partition=settings.max_inflight_per_partition)
        self.codec = MetadataCodec()
        policy = AdmissionPolicy(settings.alone_after, settings.quarantine_after, settings.lease_seconds)
        self.admission = Admission(self.tracker, policy, self._answered, routes.is_ordered)
        self.assignment = Assignment(
            self.tracker,
            self.admission,
            self.codec,
            clock,
            flight,
            from_beginning=settings.from_beginning,
            max_replay_age_seconds=settings.max_replay_age_seconds,
            lease_seconds=settings.lease_seconds,
        )
        self.watchdog = Watchdog(clock, lambda: self.assignment.open)
        consumer = partial(broker.consumer, settings.group_id)
        self.subscription = Subscription(consumer, self.assignment, routes, admin, watchdog=self.watchdog)
        self.committer = Committer(self.subscription, self.tracker, self.codec)
        self.assignment.bind(self.subscription, self.committer)

    def answered_elsewhere(self, told: Answered) -> bool:
        """Another process has dealt with this prompt; whether it waits here."""
        self._answered.add(told)
        waited = self.admission.answered(told)
        if waited:
            self.committer.progressed()
        return waited

    async def commit_at_last(self, hurry: asyncio.Event, *, must: bool) -> None:
        """The last commit, within the grace: what it does not reach is answered again by the next worker. Raises
        `BrokerUnavailableError` if it `must` be acknowledged and is not."""
        error: BrokerError | None = None
        try:
            if await bounded(self.committer.commit, min(LEAVE_SECONDS, self._grace_seconds), hurry):
                return
        except BrokerError as refused:
            error = refused
        if must:
            raise BrokerUnavailableError("the last commit was not acknowledged") from error
        log.warning("the last commit was not acknowledged", error=str(error or "in time"))
