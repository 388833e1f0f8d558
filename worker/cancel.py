"""Cancelled requests: what the control topic says, and who is told."""

import json
from collections import OrderedDict
from collections.abc import Callable

from worker.broker.api import Record
from worker.control import control_body

CancelKey = tuple[str, str]
"""Tenant and request id."""

MAX_REMEMBERED = 100_000


def cancel_record(tenant: str, request_id: str) -> tuple[bytes, bytes]:
    """Key and value of a cancel on the control topic."""
    key = json.dumps([tenant, request_id]).encode()
    return key, json.dumps({"type": "cancel", "tenant": tenant, "request_id": request_id}).encode()


def parse_cancel(record: Record) -> CancelKey | None:
    """What a control record cancels; None for one that is no cancel."""
    body = control_body(record, "cancel")
    if body is None:
        return None
    tenant, request_id = body.get("tenant", ""), body.get("request_id")
    return (tenant, request_id) if isinstance(tenant, str) and isinstance(request_id, str) else None


class CancelBook:
    """Cancels that were seen, the youngest `MAX_REMEMBERED`, and the running requests that want to hear of theirs."""

    def __init__(self) -> None:
        self._cancelled: OrderedDict[CancelKey, None] = OrderedDict()
        self._listeners: dict[CancelKey, list[Callable[[], None]]] = {}

    def cancel(self, key: CancelKey) -> None:
        """Remember and tell; a request that has ended hears nothing."""
        self._cancelled[key] = None
        self._cancelled.move_to_end(key)
        if len(self._cancelled) > MAX_REMEMBERED:
            self._cancelled.popitem(last=False)
        for tell in tuple(self._listeners.get(key, ())):
            tell()

    def take(self, record: Record) -> None:
        """A record of the control topic; what is no cancel is ignored."""
        key = parse_cancel(record)
        if key is not None:
            self.cancel(key)

    def is_cancelled(self, key: CancelKey) -> bool:
        return key in self._cancelled

    def listen(self, key: CancelKey, tell: Callable[[], None]) -> None:
        self._listeners.setdefault(key, []).append(tell)

    def forget(self, key: CancelKey, tell: Callable[[], None]) -> None:
        listeners = self._listeners[key]
        listeners.remove(tell)
        if not listeners:
            del self._listeners[key]
