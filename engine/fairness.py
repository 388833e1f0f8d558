"""How much each tenant has been served: virtual token counters (Sheng et al., arXiv 2401.00588)."""

from collections import Counter, OrderedDict

from engine.api import PriorityClass
from engine.request import Request

PREFILL_WEIGHT = 1.0
DECODE_WEIGHT = 2.0  # a generated token holds the batch for a whole step

_Key = tuple[PriorityClass, str]


class TenantCounters:
    """A counter for each class and tenant; who has less is served first.

    A tenant that comes back with nothing in work is lifted to the least of those who are there: time away earns no
    credit. Counters of the `max_tenants` that were active last are kept.
    """

    def __init__(self, *, max_tenants: int = 1024) -> None:
        self._max_tenants = max_tenants
        self._served: OrderedDict[_Key, float] = OrderedDict()
        self._active: Counter[_Key] = Counter()

    def __repr__(self) -> str:
        return f"TenantCounters(active={len(self._active)}, known={len(self._served)})"

    def served(self, request: Request) -> float:
        return self._served.get(_key(request), 0.0)

    def entered(self, request: Request) -> None:
        """A request of the tenant is in the engine."""
        key = _key(request)
        if not self._active[key]:
            others = [self._served[other] for other in self._active if other != key and other[0] is key[0]]
            self._served[key] = max(self._served.get(key, 0.0), min(others, default=0.0))
            self._served.move_to_end(key)
        self._active[key] += 1
        while len(self._served) > max(self._max_tenants, len(self._active)):
            oldest = next(iter(self._served))
            if oldest in self._active:
                self._served.move_to_end(oldest)
            else:
                del self._served[oldest]

    def left(self, request: Request) -> None:
        """A request of the tenant has ended."""
        key = _key(request)
        self._active[key] -= 1
        if not self._active[key]:
            del self._active[key]

    def charge(self, request: Request, num_tokens: int) -> None:
        """A step has run `num_tokens` of the request."""
        weight = DECODE_WEIGHT if num_tokens == 1 else PREFILL_WEIGHT
        self._served[_key(request)] = self.served(request) + weight * num_tokens


def _key(request: Request) -> _Key:
    return request.priority, request.tenant
