"""A whole worker process from its settings: engine, broker, probes, signals."""

import asyncio
import os
import signal
import time

import structlog

from engine.api import GenerationEngine
from engine.scripted import ScriptedEngine
from worker.app import WorkerApp
from worker.broker.api import Broker
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_connection import KafkaConnection
from worker.clock import SystemClock
from worker.health import HealthServer
from worker.metrics import Metrics
from worker.provision import RECORD_OVERHEAD_BYTES
from worker.security import security_of
from worker.settings import Settings
from worker.stats_log import StatsLog

STATS_SECONDS = 1.0
START_TIMEOUT_SECONDS = 60.0

log = structlog.get_logger(__name__)


def kafka_connection(settings: Settings, *, start_timeout_seconds: float = START_TIMEOUT_SECONDS) -> KafkaConnection:
    """How to reach the cluster of the settings; starting a client may take `start_timeout_seconds`.

    Raises StartError for a certificate, key or token provider that cannot be used."""
    return KafkaConnection(
        settings.bootstrap_servers,
        security=security_of(settings),
        max_message_bytes=settings.max_body_bytes + RECORD_OVERHEAD_BYTES,
        session_timeout_seconds=settings.session_timeout_seconds,
        heartbeat_interval_seconds=min(3.0, settings.session_timeout_seconds / 3),
        start_timeout_seconds=start_timeout_seconds,
    )


def build_broker(settings: Settings, *, start_timeout_seconds: float = START_TIMEOUT_SECONDS) -> Broker:
    """The Kafka cluster of the settings; connects when its clients start. Raises as `kafka_connection`."""
    return KafkaBroker(kafka_connection(settings, start_timeout_seconds=start_timeout_seconds))


def build_engine(settings: Settings) -> GenerationEngine:
    """The engine of the settings, not started. Without `model_dir` it is the bundled small model (ModelLoadError)."""
    if settings.engine == "scripted":
        return ScriptedEngine(
            tokens_per_second=settings.scripted_tokens_per_second,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
        )
    # The event loop and the broker's client need the cores that the threads of an operation would spin on while they
    # wait for each other. Read when torch is imported, so it has to stand before.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from engine.checkpoint.bundled import bundled_model_path
    from engine.engine import load_engine

    path = settings.model_dir or bundled_model_path()
    return load_engine(
        path,
        settings.engine_config(),
        dtype=settings.dtype,
        exact_modules=settings.exact_modules,
        few_rows=settings.few_rows_layout,
    )


def build_app(settings: Settings, broker: Broker, engine: GenerationEngine, metrics: Metrics) -> WorkerApp:
    """A worker that reports to `metrics`."""
    return WorkerApp(settings, broker, engine, SystemClock(), metrics)


async def serve(settings: Settings, *, until_end: bool = False) -> None:
    """Run one worker until SIGTERM or SIGINT, then drain. Raises what makes serving impossible."""
    engine, metrics = build_engine(settings), Metrics()
    app = build_app(settings, build_broker(settings), engine, metrics)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, app.request_stop)

    def ready() -> str | None:
        if app.ready:
            return None
        return engine.health.reason or "not taking prompts"

    probes = HealthServer(
        metrics,
        ready=ready,
        live=lambda: app.stalled,  # a dead engine ends the process
        details=lambda: {"kernels": engine.model.kernels} if engine.health.ready else {},
        host=settings.host,
        port=settings.port,
        metrics_port=settings.metrics_port,
    )
    async with probes:
        log.info("worker starting", port=probes.port, metrics_port=probes.metrics_port, engine=settings.engine)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_watch(engine, metrics, None if settings.disable_log_stats else StatsLog()))
            await app.run(until_end=until_end)
            watch.cancel()
    log.info("worker ended")


async def _watch(engine: GenerationEngine, metrics: Metrics, stats_log: StatsLog | None) -> None:
    while True:
        if engine.health.ready:
            stats = engine.stats()
            metrics.observe_engine(stats)
            if stats_log is not None:
                stats_log.seen(stats, time.monotonic())
        await asyncio.sleep(STATS_SECONDS)
