"""Sends the replies of one request to their destination, again and again until the broker has them or time is up."""

import asyncio

from tenacity import AsyncRetrying, RetryError, retry_if_exception, stop_after_delay, wait_random_exponential

from topics.replies import ReplyRecord
from worker.broker.api import BrokerError, MessageTooLargeError, Producer, ProducerWedgedError
from worker.replies.api import Destination, ReplyUndeliverable


def _worth_retrying(error: BaseException) -> bool:
    return isinstance(error, BrokerError) and error.retriable and not isinstance(error, ProducerWedgedError)


class BrokerSink:
    """Keeps the order of the attempt: a record is sent when the one before is acknowledged. The time counts from the
    last record that was, also where an attempt begins again."""

    def __init__(self, producer: Producer, destination: Destination, *, give_up_seconds: float) -> None:
        self._producer = producer
        self._destination = destination
        self._give_up_seconds = give_up_seconds
        self._wedged_since: float | None = None

    async def send(self, record: ReplyRecord) -> None:
        began = asyncio.get_running_loop().time() if self._wedged_since is None else self._wedged_since
        try:
            async with asyncio.timeout_at(began + self._give_up_seconds):
                try:
                    await self._send(record)  # nearly always enough, and cheaper than a retry loop around it
                except BrokerError as error:
                    if not _worth_retrying(error):
                        raise
                    await self._send_again(record)
        except MessageTooLargeError:
            raise
        except ProducerWedgedError:
            self._wedged_since = began
            raise
        except (RetryError, TimeoutError) as error:
            raise ReplyUndeliverable(f"no acknowledgement within {self._give_up_seconds} s") from error
        except BrokerError as error:
            raise ReplyUndeliverable(str(error) or type(error).__name__) from error
        self._wedged_since = None

    async def _send(self, record: ReplyRecord) -> None:
        value, headers = record
        to = self._destination
        await self._producer.send(to.topic, value, key=to.key, headers=headers, partition=to.partition)

    async def _send_again(self, record: ReplyRecord) -> None:
        wait = wait_random_exponential(multiplier=0.05, max=2.0)
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(_worth_retrying), stop=stop_after_delay(self._give_up_seconds), wait=wait
        ):
            with attempt:
                await self._send(record)
