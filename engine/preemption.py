"""Who gives way: for urgent requests, for one that has to run alone, and where blocks are short. Decides only."""

from collections.abc import Collection, Sequence

from engine.admission import Admission
from engine.config import EngineConfig
from engine.policy import PriorityPolicy
from engine.request import Request


class Preemption:
    """Names victims; whoever asks takes them off the device."""

    def __init__(self, config: EngineConfig, policy: PriorityPolicy, admission: Admission) -> None:
        self._config = config
        self._policy = policy
        self._admission = admission

    def for_urgent(
        self, urgent: Sequence[Request], running: Sequence[Request], parked: Collection[str]
    ) -> list[Request]:
        """Work of lower classes until these waiting requests have slots and blocks; none in vain, none parked."""
        left, victims = list(running), list[Request]()
        free = [request for request in running if request.request_id not in parked]
        for slots_wanted, request in enumerate(urgent, start=1):
            tentative: list[Request] = []
            while len(left) + slots_wanted > self._config.max_num_seqs or not self._admission.fits(request, left):
                victim = self._policy.victim_for(request, free)
                if victim is None:
                    return victims
                free.remove(victim)
                left.remove(victim)
                tentative.append(victim)
            victims += tentative
        return victims

    def for_suspect(self, suspect: Request, running: Sequence[Request], now: float) -> list[Request]:
        """As many as it takes until it fits: nothing runs before it, so nothing else makes room."""
        left, victims = list(running), list[Request]()
        while left and not (len(left) < self._config.max_num_seqs and self._admission.fits(suspect, left)):
            victim = max(left, key=lambda request: self._policy.key(request, now))
            left.remove(victim)
            victims.append(victim)
        return victims

    def for_blocks(self, running: Sequence[Request], scheduled: Collection[str], now: float) -> Request:
        """The least urgent, latest one that the step does not run yet."""
        return max(
            (r for r in running if r.request_id not in scheduled), key=lambda request: self._policy.key(request, now)
        )
