"""A whole worker from its settings: engine, broker, probes, signals, and the supervisor above it."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import structlog

from engine.api import GenerationEngine
from engine.scripted import ScriptedEngine
from worker.app import WorkerApp
from worker.broker.api import Broker
from worker.broker.kafka import KafkaBroker
from worker.broker.kafka_connection import KafkaConnection
from worker.child import Child
from worker.child_process import ChildProcess
from worker.clock import SystemClock
from worker.flight_log import FlightLog, HangWatch, written_on_sigquit
from worker.handover import Handover
from worker.health import Answering, HealthServer, Probes
from worker.link import Link
from worker.loop_watch import LoopWatch
from worker.metrics import Metrics
from worker.processes import PidProcess, fork, inherited, reap_orphans, spawn
from worker.provision import RECORD_OVERHEAD_BYTES
from worker.security import security_of
from worker.settings import Settings
from worker.stats_log import StatsLog
from worker.supervisor import RestartPolicy, StopPolicy, Supervisor

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
    from engine.model_engine import load_engine

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


def serve(settings: Settings, *, until_end: bool = False) -> int:
    """Run one worker until SIGTERM or SIGINT, then drain; the exit code. Raises what makes serving impossible.

    With `until_end` this process serves. Else it becomes the supervisor of another that does: see
    `worker.supervisor`."""
    if until_end:
        asyncio.run(_serve_here(settings))
        return 0
    line = inherited()
    if line is None:
        first, line = fork()
        if first is not None:
            return asyncio.run(_supervise(settings, first, line))
    asyncio.run(_serve_below(settings, line))
    return 0


class Serving:
    """A worker with what it answers to probes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine, self._metrics = build_engine(settings), Metrics()
        self.app = build_app(settings, build_broker(settings), self._engine, self._metrics)
        self.probes = Probes(
            self._metrics, ready=lambda: self.app.unready, live=lambda: self.app.stalled, details=self._details
        )
        self.flight_log = FlightLog(self._engine.flight, settings.flight_recorder_dir)

    async def run(self, *, until_end: bool = False, handover: Handover | None = None) -> None:
        loop_watch = LoopWatch(lambda: self.flight_log.write("the event loop stands still"))
        try:
            with written_on_sigquit(self.flight_log), loop_watch:
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(self._watch(loop_watch))
                    await self.app.run(until_end=until_end, handover=handover)
                    watch.cancel()
        except Exception as error:  # whatever ends the worker: what came before it is kept, and it goes on
            self.flight_log.write(f"the worker ends with {_kinds(error)}")
            raise
        log.info("worker ended")

    async def _watch(self, loop_watch: LoopWatch) -> None:
        stats_log, hang, stalled = None if self._settings.disable_log_stats else StatsLog(), HangWatch(), False
        while True:
            loop_watch.beat()
            if self._engine.health.ready:
                stats = self._engine.stats()
                self._metrics.observe_engine(stats)
                if stats_log is not None:
                    stats_log.seen(stats, time.monotonic())
                if hang.hangs(stats, time.monotonic()):
                    self.flight_log.write("no step of the engine ends")
            before, stalled = stalled, self.app.stalled is not None
            if stalled and not before:
                self.flight_log.write("a partition stands still")
            await asyncio.sleep(STATS_SECONDS)

    def _details(self) -> dict[str, str]:
        return {"kernels": self._engine.model.kernels} if self._engine.health.ready else {}


@asynccontextmanager
async def _listening(settings: Settings, answering: Answering) -> AsyncIterator[None]:
    server = HealthServer(answering, host=settings.host, port=settings.port, metrics_port=settings.metrics_port)
    async with server:
        log.info("worker starting", port=server.port, metrics_port=server.metrics_port, engine=settings.engine)
        yield


async def _serve_here(settings: Settings) -> None:
    serving = Serving(settings)
    _on_signals((signal.SIGTERM, signal.SIGINT), serving.app.request_stop)
    async with _listening(settings, serving.probes):
        await serving.run(until_end=True)


async def _serve_below(settings: Settings, line: socket.socket) -> None:
    """Serve for a supervisor, whose end is ours: two processes that hold the same ports and prompts are none."""
    serving = Serving(settings)
    link = await Link.over(line)
    child = Child(link, serving.app, serving.probes, orphaned=lambda: os._exit(1))
    _on_signals((signal.SIGTERM, signal.SIGINT), serving.app.request_stop)
    _on_signals((signal.SIGUSR2, signal.SIGHUP), lambda: None)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(child.run())
        await serving.run(handover=child)
        following.cancel()


async def _supervise(settings: Settings, first: PidProcess, line: socket.socket) -> int:
    async def start() -> ChildProcess:
        process, line = spawn()
        return ChildProcess(process, await Link.over(line))

    supervisor = Supervisor(
        start,
        StopPolicy(settings.grace_seconds, settings.lease_seconds),
        RestartPolicy(
            settings.restart_after_seconds,
            settings.restart_memory_growth_bytes,
            one_at_a_time=_one_at_a_time(settings),
        ),
    )
    _on_signals((signal.SIGTERM, signal.SIGINT), supervisor.request_stop)
    _on_signals((signal.SIGUSR2,), supervisor.request_restart)
    _on_signals((signal.SIGQUIT,), lambda: _pass_on(signal.SIGQUIT, supervisor.pids))
    _on_signals((signal.SIGHUP,), lambda: log.info("SIGHUP is ignored: SIGUSR2 restarts with the settings of now"))
    if os.getpid() == 1:
        _on_signals((signal.SIGCHLD,), lambda: reap_orphans(supervisor.pids))
    child = ChildProcess(first, await Link.over(line))
    try:
        async with _listening(settings, supervisor.answer):
            return await supervisor.run(child)
    finally:
        first.kill()


def _one_at_a_time(settings: Settings) -> str | None:
    if settings.enable_l3_cache and settings.l3_cache_path:
        return f"{', '.join(map(str, settings.l3_cache_path))} can be used by one process only"
    return None


def _on_signals(numbers: Iterable[signal.Signals], call: Callable[[], object]) -> None:
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, call)


def _pass_on(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def _kinds(error: BaseException) -> str:
    """The kinds of errors in a group, or of the one."""
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(_kinds(one) for one in error.exceptions)
    return type(error).__name__
