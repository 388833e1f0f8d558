"""The order of service: class first, then arrival; ageing lifts whoever has waited."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.api import PriorityClass
from engine.request import Request

RANK = {priority: rank for rank, priority in enumerate(PriorityClass)}


@dataclass(frozen=True, slots=True)
class PriorityPolicy:
    """A request rises one class for every `ageing_seconds` of waiting; a request preempted `max_preemptions` times by
    urgent ones is no longer their victim."""

    ageing_seconds: float = 30.0
    max_preemptions: int = 3

    def key(self, request: Request, now: float) -> tuple[float, float, str]:
        """Sort key, smaller is served earlier."""
        waited = max(0.0, now - request.arrival_seconds)
        return (
            max(0.0, RANK[request.priority] - waited // self.ageing_seconds),
            request.arrival_seconds,
            request.request_id,
        )

    def order(self, requests: Iterable[Request], now: float) -> list[Request]:
        return sorted(requests, key=lambda request: self.key(request, now))

    def victim_for(self, request: Request, running: Iterable[Request], now: float) -> Request | None:
        """The running request that an urgent arrival may displace, if any: of a lower class, the latest arrived."""
        if request.priority is not PriorityClass.URGENT:
            return None
        others = [
            r
            for r in running
            if r.priority is not PriorityClass.URGENT
            and r.num_preemptions < self.max_preemptions
            and self.key(r, now) > self.key(request, now)
        ]
        return max(others, key=lambda r: self.key(r, now), default=None)
