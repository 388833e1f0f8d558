"""confluent-kafka (librdkafka): the plain client, which streams and applies the attempt rule by hand."""

# snippet
import json
import time
import uuid
from collections.abc import Iterator

from confluent_kafka import Consumer, Producer, TopicPartition


class AskV4flash:
    """`for text in client.stream("..."): ...` yields the text so far; it begins again where a worker was lost."""

    def __init__(self, servers: str, prompts: str, replies: str) -> None:
        # murmur2_random puts a key where Java's clients put it
        self.producer = Producer({"bootstrap.servers": servers, "partitioner": "murmur2_random", "linger.ms": 0})
        self.consumer = Consumer({"bootstrap.servers": servers, "group.id": "unused", "enable.auto.commit": False})
        self.prompts, self.replies = prompts, replies
        partitions = self.consumer.list_topics(replies, timeout=10).topics[replies].partitions
        ends = [TopicPartition(replies, number) for number in partitions]
        for end in ends:
            end.offset = self.consumer.get_watermark_offsets(end, timeout=10)[1]
        self.consumer.assign(ends)

    def stream(self, question: str, timeout: float = 60.0) -> Iterator[str]:
        correlation_id = uuid.uuid4().hex.encode()
        body = {"messages": [{"role": "user", "content": question}], "stream": True}
        headers = {"x-correlation-id": correlation_id, "x-reply-topic": self.replies.encode()}
        self.producer.produce(self.prompts, json.dumps(body), headers=headers)
        self.producer.flush()
        attempts: dict[bytes, list[str]] = {}
        ends = time.monotonic() + timeout
        while time.monotonic() < ends:
            record = self.consumer.poll(0.5)
            if record is None or record.error():
                continue
            found = dict(record.headers() or ())
            if found.get("x-correlation-id") != correlation_id:
                continue
            texts = attempts.setdefault(found["x-attempt"], [])
            if int(found["x-seq"]) != len(texts):
                continue  # sent twice, or of an attempt whose beginning we have not seen
            chunk = json.loads(record.value())
            if found["x-event"] == b"error":
                raise RuntimeError(chunk["error"]["code"])
            texts.append(chunk["choices"][0]["delta"]["content"])
            yield "".join(texts)
            if "x-final" in found:
                return
        raise TimeoutError(question)


# end snippet

if __name__ == "__main__":
    import os
    import sys

    client = AskV4flash(*(os.environ[name] for name in ("BOOTSTRAP_SERVERS", "PROMPTS", "REPLIES")))
    print("ready", flush=True)
    while line := sys.stdin.readline().strip():
        try:
            text = ""
            for text in client.stream(line):  # noqa: B007  the last one is the whole
                pass
            print("answer", text, sep="\t", flush=True)
        except RuntimeError as error:
            print("error", error, sep="\t", flush=True)
