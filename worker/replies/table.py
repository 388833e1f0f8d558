"""Reply mode -> how its replier is made. A new reply mode is a line here."""

from collections.abc import Callable, Mapping

from topics.headers import ReplyMode
from topics.replies import ReplyContext
from worker.clock import Clock
from worker.replies.api import Replier, ReplySink
from worker.replies.final import FinalReplier
from worker.replies.stream import CoalescePolicy, StreamReplier

ReplierFactory = Callable[[ReplyContext, ReplySink, Clock, CoalescePolicy], Replier]


def _final(context: ReplyContext, sink: ReplySink, clock: Clock, policy: CoalescePolicy) -> Replier:
    return FinalReplier(context, sink)


def _chunks(context: ReplyContext, sink: ReplySink, clock: Clock, policy: CoalescePolicy) -> Replier:
    return StreamReplier(context, sink, clock=clock, policy=policy, whole=False)


def _both(context: ReplyContext, sink: ReplySink, clock: Clock, policy: CoalescePolicy) -> Replier:
    return StreamReplier(context, sink, clock=clock, policy=policy, whole=True)


REPLIERS: Mapping[ReplyMode, ReplierFactory] = {"final": _final, "chunks": _chunks, "both": _both}
