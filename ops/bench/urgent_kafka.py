"""The same as `urgent.py`, through Kafka: a worker in a process of its own for each variant, asked by its topics."""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "kafka"))

from broker import KafkaServer
from load import Ask, LoadClient, make_topics
from recording import RecordingRunner, Step, work_between
from urgent import CONFIG, URGENT_OUT, URGENT_TOKENS, VARIANTS, Prompts, arrivals_of, phase, results
from workloads import corpus

from engine.api import PriorityClass
from engine.checkpoint.bundled import bundled_model_path
from engine.engine import Engine
from engine.loading import load_model_and_core
from engine.text.tokenizer import Tokenizer, load_tokenizer
from topics.names import TopicNames
from worker.metrics import Metrics
from worker.serve import build_app, build_broker
from worker.settings import Settings

BULK_ALONE: dict[str, Any] = {"bulk": True, "rate": 1.0, "arrivals": 0}


def serve_recorded(pipe: Any, values: dict[str, Any]) -> None:
    """A worker until the pipe says stop; then its steps go back. The monotonic clock is one for all processes."""
    asyncio.run(_serve(pipe, Settings(**values)))


async def _serve(pipe: Any, settings: Settings) -> None:
    loaded = load_model_and_core(
        bundled_model_path(),
        settings.engine_config(),
        name=None,
        dtype=settings.dtype,
        exact_modules=(),
        few_rows=True,
        check=False,
    )
    recording = RecordingRunner(loaded.core.runner)
    loaded.core.runner = recording
    app = build_app(settings, build_broker(settings), Engine(lambda: loaded), Metrics())
    serving = asyncio.create_task(app.run())
    while not app.ready and not serving.done():  # noqa: ASYNC110  the app has no event for it, and this is no worker
        await asyncio.sleep(0.05)
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    app.request_stop()
    await serving
    pipe.send(recording.steps)


class KafkaAsker:
    """Asks by prompt records in mode chunks; a token's time is that of the record that brought it."""

    def __init__(self, client: LoadClient, prompts: Prompts, tokenizer: Tokenizer) -> None:
        self._client, self._prompts, self._tokenizer = client, prompts, tokenizer
        self._open: dict[str, tuple[list[float], asyncio.Future[None]]] = {}

    async def read(self) -> None:
        """Hand out what comes on the reply topic, until cancelled."""
        async for request_id, record in self._client.records():
            if request_id not in self._open:
                continue
            times, ended = self._open[request_id]
            headers = dict(record.headers)
            if headers.get("x-event") == b"error":
                ended.set_exception(RuntimeError(record.value.decode()))
            times.append(time.monotonic())
            if "x-final" in headers and not ended.done():
                ended.set_result(None)

    async def ask(self, name: str, priority: PriorityClass, length: int, num_out: int) -> list[float]:
        text = self._tokenizer.decode(list(self._prompts.cut(length)))
        body = {"prompt": text, "max_tokens": num_out, "temperature": 0, "ignore_eos": True}
        times: list[float] = []
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[name] = times, ended
        try:
            await self._client.send([Ask(name, "/v1/completions", "chunks", body, priority.value)])
            await ended
        finally:
            del self._open[name]
        return times


async def measure_through_kafka(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer(bundled_model_path())
    prompts = Prompts(corpus(tokenizer.encode_text))
    steps: list[Step] = []
    idle: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench.") as folder, KafkaServer(Path(folder) / "kafka") as server:
        for turn in range(options.rounds):
            for variant, interrupts in VARIANTS.items():
                names = TopicNames(f"urgent-{variant}-{turn}")
                await make_topics(server.bootstrap_servers, names)
                worker = RecordedWorker(server.bootstrap_servers, names, options.dtype, interrupts)
                await asyncio.to_thread(worker.start)
                async with LoadClient(server.bootstrap_servers, names) as client:
                    asker = KafkaAsker(client, prompts, tokenizer)
                    reading = asyncio.create_task(asker.read())
                    await phase(asker.ask, f"warm-{variant}{turn}", bulk=True, rate=1.0, arrivals=1)
                    alone.append(
                        await phase(asker.ask, f"alone-{variant}{turn}", seconds=options.seconds, **BULK_ALONE)
                    )
                    for share, arrivals in zip(options.shares, options.arrivals, strict=True):
                        each = arrivals_of(variant, -(-arrivals // options.rounds))
                        rate = share * options.capacity / (URGENT_TOKENS + URGENT_OUT)
                        name = f"{variant}{turn}-{share}"
                        if interrupts:
                            few = arrivals_of("idle", each)
                            idle.append(await phase(asker.ask, f"idle-{name}", bulk=False, rate=rate, arrivals=few))
                        run = await phase(asker.ask, f"run-{name}", bulk=True, rate=rate, arrivals=each)
                        runs.setdefault(f"{variant} {100 * share:g} %", []).append(run)
                    reading.cancel()
                steps += await asyncio.to_thread(worker.stop)
    rates = [work_between(steps, part["began"], part["ended"])["tokens_per_second"] for part in alone]
    return results(sum(rates) / len(rates), idle, alone, runs, steps)


class RecordedWorker:
    """`serve_recorded` in another process."""

    def __init__(self, bootstrap: str, names: TopicNames, dtype: str, interrupts: bool) -> None:
        values = {
            "bootstrap_servers": bootstrap,
            "prefix": names.prefix,
            "group_id": names.prefix,
            "dtype": dtype,
            "enable_interrupts": interrupts,
            "num_blocks": CONFIG.num_blocks,
            "max_num_seqs": CONFIG.max_num_seqs,
            "max_num_batched_tokens": CONFIG.max_num_batched_tokens,
            "prefill_chunk_size": CONFIG.prefill_chunk_size,
            "urgent_reserved_seqs": CONFIG.urgent_reserved_seqs,
            "urgent_reserved_blocks": CONFIG.urgent_reserved_blocks,
            "grace_seconds": 5,
            "streaming_timeout_ms": 600_000,
            "first_token_timeout_ms": 600_000,
        }
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_recorded, args=(theirs, values), daemon=True)

    def start(self) -> None:
        self._process.start()
        self._pipe.recv()

    def stop(self) -> list[Step]:
        self._pipe.send("stop")
        steps: list[Step] = self._pipe.recv()
        self._process.join(30)
        return steps
