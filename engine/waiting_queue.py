"""The requests that wait, and the order in which they are served. Knows no blocks and no batch."""

from collections.abc import Iterator

from engine.api import PriorityClass
from engine.fairness import TenantCounters
from engine.policy import PriorityPolicy
from engine.predictors import OutputLengthPredictor
from engine.request import Request


class WaitingQueue:
    """In order: one starving request if nobody runs in that lane, then class by class; within a class whoever was
    preempted or lifted into it, then the tenant that has had least, then arrival."""

    def __init__(self, policy: PriorityPolicy, tenants: TenantCounters, lengths: OutputLengthPredictor) -> None:
        self.policy = policy
        self._tenants = tenants
        self.lengths = lengths
        self.num_added = 0
        self.num_urgent = 0
        self._requests: list[Request] = []

    def __repr__(self) -> str:
        return f"WaitingQueue({len(self._requests)})"

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        self.num_added += 1
        self.num_urgent += request.priority is PriorityClass.URGENT
        self._requests.append(request)

    def remove(self, request: Request) -> None:
        """Raises ValueError for one that does not wait."""
        self._requests.remove(request)
        self.num_urgent -= request.priority is PriorityClass.URGENT

    def urgent(self, now: float) -> list[Request]:
        """The urgent ones, in order."""
        return sorted((r for r in self if r.priority is PriorityClass.URGENT), key=lambda r: self._key(r, now))

    def in_order(self, now: float, *, is_lane_free: bool, is_cool: bool = True) -> list[Request]:
        """All of them; with `is_lane_free` the one that has starved longest, if any has, is the first.

        Unless the device is cool, those with more prompt than answer come before the others of their class."""
        ordered = sorted(self._requests, key=lambda request: self._key(request, now, is_cool=is_cool))
        starving = [r for r in self._requests if self.policy.is_starving(r, now)] if is_lane_free else []
        if starving:
            first = min(starving, key=lambda r: (r.arrival_seconds, r.request_id))
            ordered.remove(first)
            ordered.insert(0, first)
        return ordered

    def _key(
        self, request: Request, now: float, *, is_cool: bool = True
    ) -> tuple[float, bool, bool, float, float, str]:
        rank = self.policy.rank(request, now)
        is_back = request.num_preemptions > 0 or self.policy.is_lifted(request, now)
        served = 0.0 if is_back else self._tenants.served(request)
        writes_more = not is_cool and self.lengths.remaining_tokens(request) > request.num_prompt_tokens
        return (rank, not is_back, writes_more, served, request.arrival_seconds, request.request_id)
