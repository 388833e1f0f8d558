"""Runs one Apache Kafka node (KRaft) on free loopback ports: `python ops/kafka/broker.py start|stop|run`.

Needs Java 17 and Maven; the jars are kept in `.cache/kafka/libs`. Tests use `KafkaServer` as a context manager.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType, TracebackType

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "kafka"
LIBS = CACHE / "libs"
STATE = CACHE / "server"
START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 20.0
LISTENERS = ("listeners", "advertised.listeners")

CONFIG = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},PROXIED://127.0.0.1:{behind_proxy},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},PROXIED://127.0.0.1:{proxy}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={logs}
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
"""


def missing_tools() -> list[str]:
    """The commands that Kafka needs and this machine lacks."""
    return [tool for tool in ("java", "mvn") if shutil.which(tool) is None]


def fetch_libs() -> None:
    """Let Maven copy Kafka's jars, once; a half-finished copy does not count."""
    if LIBS.is_dir():
        return
    print(f"copying Kafka's jars to {LIBS}", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="libs.", dir=CACHE))
    pom = Path(__file__).with_name("pom.xml")
    command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={partial}"]
    try:
        subprocess.run([*command, "-DincludeScope=runtime"], check=True, timeout=600)
        partial.rename(LIBS)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def free_ports(num_ports: int) -> list[int]:
    """Loopback ports that nobody listened on a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ports)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class KafkaServer:
    """One node with its data in `folder`; `bootstrap_servers` is valid after `start`, which returns when it answers.
    Clients that connect to `proxy_port` are told to stay there: a proxy may listen on it and pass them on to
    `port_behind_proxy`. Started again, it has the same ports and data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bootstrap_servers = ""
        self.proxy_port = self.port_behind_proxy = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_before = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        fetch_libs()
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.properties"
        if not config.exists():
            port, controller, behind, proxy = free_ports(4)
            logs = self.folder / "logs"
            ports = {"port": port, "controller": controller, "behind_proxy": behind, "proxy": proxy}
            config.write_text(self._changed(CONFIG.format(logs=logs, **ports)))
            cluster_id = self._java("kafka.tools.StorageTool", "random-uuid").strip().splitlines()[-1]
            format_storage = ("format", "-t", cluster_id, "-c", str(config), *self._format_arguments())
            self._java("kafka.tools.StorageTool", *format_storage)
        settings = dict(line.split("=", 1) for line in config.read_text().splitlines())
        listeners = [dict(part.split("://") for part in settings[name].split(",")) for name in LISTENERS]
        self.bootstrap_servers = listeners[1]["PLAINTEXT"]
        self.proxy_port = int(listeners[1]["PROXIED"].rsplit(":", 1)[1])
        self.port_behind_proxy = int(listeners[0]["PROXIED"].rsplit(":", 1)[1])
        print(f"starting Kafka on {self.bootstrap_servers}, log in {self.folder / 'kafka.log'}", flush=True)
        with (self.folder / "kafka.log").open("ab") as log:
            self._log_before = log.tell()
            self._process = subprocess.Popen(
                self._command("kafka.Kafka", str(config)), stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise

    def _changed(self, config: str) -> str:
        """The configuration that is used, for a subclass to add to."""
        return config

    def _format_arguments(self) -> list[str]:
        """Further arguments of the storage's format."""
        return []

    def kill(self) -> None:
        """SIGKILL; what it had acknowledged is in the page cache."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is None:
            return
        print(f"stopping Kafka, pid {self._process.pid}", flush=True)
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def wait(self) -> int:
        """Block until the node ends by itself."""
        return 0 if self._process is None else self._process.wait()

    def _wait_until_up(self) -> None:
        host, port = self.bootstrap_servers.split(":")
        log, before = self.folder / "kafka.log", self._log_before
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"Kafka ended at once:\n{log.read_text()[-2000:]}")
            try:
                with socket.create_connection((host, int(port)), timeout=1):
                    pass
                if "Kafka Server started" in log.read_text()[before:]:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"Kafka did not come up:\n{log.read_text()[-2000:]}")

    def _command(self, *arguments: str) -> list[str]:
        return ["java", "-Xmx512m", "-Xms128m", "-XX:+UseSerialGC", "-cp", f"{LIBS}/*", *arguments]

    def _java(self, *arguments: str) -> str:
        result = subprocess.run(self._command(*arguments), check=True, timeout=60, capture_output=True, text=True)
        return result.stdout

    def __enter__(self) -> "KafkaServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def stop_started() -> None:
    """Stop, by its pid, the node that `start` left running; a pid that is not Kafka any more is left alone."""
    pid_file = STATE / "pid"
    if not pid_file.exists():
        print("no Kafka was started here")
        return
    pid = int(pid_file.read_text())
    listing = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False)
    if "kafka.Kafka" in listing.stdout:
        print(f"stopping Kafka, pid {pid}")
        node = os.pidfd_open(pid)
        signal.pidfd_send_signal(node, signal.SIGTERM)
        ended, _, _ = select.select([node], [], [], STOP_TIMEOUT_SECONDS)
        if not ended:
            signal.pidfd_send_signal(node, signal.SIGKILL)
            select.select([node], [], [])
        os.close(node)
    pid_file.unlink()


def _end_as_on_ctrl_c(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(command: str) -> int:
    if missing := missing_tools():
        print(f"not found: {', '.join(missing)}", file=sys.stderr)
        return 1
    match command:
        case "start":
            server = KafkaServer(STATE)
            server.start()
            (STATE / "pid").write_text(str(server.pid))
            print(server.bootstrap_servers)
        case "stop":
            stop_started()
        case "run":
            for ending in (signal.SIGTERM, signal.SIGINT):  # a background job of a shell ignores Ctrl-C
                signal.signal(ending, _end_as_on_ctrl_c)
            try:
                with tempfile.TemporaryDirectory(prefix="kafka.") as folder, KafkaServer(Path(folder)) as server:
                    return server.wait()
            except KeyboardInterrupt:
                return 0
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else ""))
