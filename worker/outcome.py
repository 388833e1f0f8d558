"""What a client is told of an exception. A pure mapping; None says that the record must stay for redelivery."""

from engine.errors import EngineDeadError, EngineError
from topics.errors import ErrorCode, InvalidMessage
from worker.broker.api import BrokerError, MessageTooLargeError
from worker.ended import RateLimited, RequestEnded
from worker.replies.api import Failure


def failure_of(error: Exception) -> Failure | None:
    """The error reply of an exception. Text of unexpected exceptions never leaves the process."""
    match error:
        case InvalidMessage():
            return Failure(error.code, error.message, error.param)
        case RateLimited():
            retry = error.retry_after_ms
            return Failure(error.code, str(error), retriable=error.retriable, retry_after_ms=retry)
        case RequestEnded():
            return Failure(error.code, str(error), error.param, retriable=error.retriable)
        case EngineDeadError():
            return None
        case EngineError():
            return Failure(ErrorCode(error.code), str(error), error.param, retriable=error.retriable)
        case MessageTooLargeError():
            return Failure(ErrorCode.REPLY_TOO_LARGE, "the reply is larger than its topic accepts")
        case BrokerError():
            return None
        case _:
            return Failure(ErrorCode.INTERNAL_ERROR, "the worker failed on this request", retriable=True)
