"""Ends of a request that are neither the client's text nor the engine's fault."""

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
