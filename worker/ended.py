"""Ends of a request that are neither the client's text nor the engine's fault."""

import math

from topics.errors import ErrorCode


class RequestEnded(Exception):  # noqa: N818  an outcome, not a fault
    """The request ends without an answer; the docstring is what the client is told, `param` the header it is about."""

    code = ErrorCode.INTERNAL_ERROR
    retriable = False

    def __init__(self, param: str | None = None) -> None:
        super().__init__((type(self).__doc__ or "").strip())
        self.param = param


class DeadlineExceeded(RequestEnded):
    """The deadline of the request has passed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class RequestCancelled(RequestEnded):
    """The request was cancelled."""

    code = ErrorCode.CANCELLED


class RequestIdConflict(RequestEnded):
    """The request id was used before with another body."""

    code = ErrorCode.REQUEST_ID_CONFLICT


class PromptQuarantined(RequestEnded):
    """The workers died again and again while this request ran alone: it is put aside."""

    code = ErrorCode.QUARANTINED


class StreamStalled(RequestEnded):
    """No token arrived within the streaming timeout."""

    code = ErrorCode.STREAMING_TIMEOUT
    retriable = True


class RateLimited(RequestEnded):
    """The tenant takes more of this worker than it may."""

    code = ErrorCode.RATE_LIMITED

    def __init__(self, quota: str, *, retry_after_seconds: float | None) -> None:
        """`quota` is the name of the limit; None: it is smaller than the request, so that waiting does not help."""
        super().__init__()
        self.args = (f"the tenant's quota of {quota} is used up",)
        self.retry_after_ms = None if retry_after_seconds is None else math.ceil(retry_after_seconds * 1000)
        self.retriable = retry_after_seconds is not None
