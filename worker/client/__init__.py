"""The client library: `async with Client.connect("localhost:9092") as client: ...`."""

from worker.client.answer import Answer, AnswerChangedError, NoAnswerError, RequestFailedError
from worker.client.client import Client
from worker.client.prompt import Prompt

__all__ = ["Answer", "AnswerChangedError", "Client", "NoAnswerError", "Prompt", "RequestFailedError"]
