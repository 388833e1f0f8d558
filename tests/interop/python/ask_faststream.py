"""FastStream: `publish` with its `reply_to` and `correlation_id`, and a subscriber of the reply topic."""

# snippet
import asyncio
import uuid

from faststream.kafka import KafkaBroker, KafkaMessage


class AskV4flash:
    """`await AskV4flash(servers, prompts, replies).ask("...")`, after `await client.broker.start()`."""

    def __init__(self, servers: str, prompts: str, replies: str) -> None:
        self.broker = KafkaBroker(servers)
        self.prompts, self.replies = prompts, replies
        self.waiting: dict[str, asyncio.Future[KafkaMessage]] = {}
        self.broker.subscriber(replies, auto_offset_reset="latest")(self._take)

    async def ask(self, question: str) -> str:
        correlation_id = str(uuid.uuid4())
        self.waiting[correlation_id] = asyncio.get_running_loop().create_future()
        body = {"messages": [{"role": "user", "content": question}]}
        try:
            await self.broker.publish(body, self.prompts, correlation_id=correlation_id, reply_to=self.replies)
            reply = await asyncio.wait_for(self.waiting[correlation_id], 60)
        finally:
            del self.waiting[correlation_id]
        answer = await reply.decode()
        if reply.headers["x-event"] == "error":
            raise RuntimeError(answer["error"]["code"])
        return answer["choices"][0]["message"]["content"]

    async def _take(self, message: KafkaMessage) -> None:
        waiting = self.waiting.get(message.correlation_id)
        if waiting is not None and not waiting.done():  # the first answer counts, a second one is a duplicate
            waiting.set_result(message)


# end snippet


async def main() -> None:
    client = AskV4flash(*(os.environ[name] for name in ("BOOTSTRAP_SERVERS", "PROMPTS", "REPLIES")))
    await client.broker.start()
    print("ready", flush=True)
    while question := (await asyncio.to_thread(sys.stdin.readline)).strip():
        try:
            print("answer", await client.ask(question), sep="\t", flush=True)
        except RuntimeError as error:
            print("error", error, sep="\t", flush=True)
    await client.broker.stop()


if __name__ == "__main__":
    import os
    import sys

    asyncio.run(main())
