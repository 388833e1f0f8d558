"""Who comes first and who gives way: class, then arrival; ageing lifts whoever has waited."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.api import PriorityClass
from engine.request import Request

RANK = {priority: rank for rank, priority in enumerate(PriorityClass)}


@dataclass(frozen=True, slots=True)
class PriorityPolicy:
    """A request rises one class for every `ageing_seconds` of waiting, but never among the urgent ones; after
    `starving_seconds` one at a time goes before them. A request preempted `max_preemptions` times by urgent ones, or
    that has not got on since the last time, is not their victim."""

    ageing_seconds: float = 30.0
    starving_seconds: float = 60.0
    max_preemptions: int = 3

    def rank(self, request: Request, now: float) -> float:
        """Of the class that the request counts in now; smaller is served earlier."""
        own = RANK[request.priority]
        waited = max(0.0, now - request.arrival_seconds)
        return max(min(own, RANK[PriorityClass.STANDARD]), own - waited // self.ageing_seconds)

    def is_lifted(self, request: Request, now: float) -> bool:
        return self.rank(request, now) < RANK[request.priority]

    def is_starving(self, request: Request, now: float) -> bool:
        return request.priority is not PriorityClass.URGENT and now - request.arrival_seconds >= self.starving_seconds

    def key(self, request: Request, now: float) -> tuple[float, float, str]:
        """Sort key, smaller is served earlier."""
        return (self.rank(request, now), request.arrival_seconds, request.request_id)

    def order(self, requests: Iterable[Request], now: float) -> list[Request]:
        return sorted(requests, key=lambda request: self.key(request, now))

    def victim_for(self, request: Request, running: Iterable[Request]) -> Request | None:
        """The running request that an urgent arrival may displace, if any: of the lowest class the one that loses
        least work, the latest of equals."""
        if request.priority is not PriorityClass.URGENT:
            return None
        return max(
            (r for r in running if self._may_give_way(r)),
            key=lambda r: (RANK[r.priority], -r.num_computed_tokens, r.arrival_seconds, r.request_id),
            default=None,
        )

    def _may_give_way(self, request: Request) -> bool:
        return (
            request.priority is not PriorityClass.URGENT
            and not request.has_lane
            and request.num_preemptions < self.max_preemptions
            and (not request.num_preemptions or request.num_tokens > request.num_tokens_when_preempted)
        )
