"""A soak: two workers at half of what they can carry, a random fault every 30 s, every prompt in the ledger.

python tests/drills/soak.py --minutes 60 --engine model

First the rate at which answers come out of a full queue is measured for a while; prompts are then sent at half of it.
One worker is never killed, so that its memory at the start and at the end can be told; the other, and the broker, are.
The exit code is 0 if nothing was lost and every answer was right.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
import uuid
from contextlib import AsyncExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "ops" / "kafka"), str(Path(__file__).parent), str(ROOT)]

from broker import KafkaServer  # noqa: E402
from ledger import MAX_TOKENS, Ledger  # noqa: E402
from workers import Worker, Workers  # noqa: E402

from worker.provision import create_topics, topics_of  # noqa: E402

FAULT_SECONDS = 30.0
MEASURE_PROMPTS = 64
CLASSES = ("urgent", "standard", "bulk")


class Soak:
    """Two workers, one of which stays."""

    def __init__(self, server: KafkaServer, ledger: Ledger, workers: Workers, options: argparse.Namespace) -> None:
        self.server, self.ledger, self.workers, self.options = server, ledger, workers, options
        self.chance = random.Random(options.seed)
        self.faults: dict[str, int] = {}
        self.began = time.monotonic()
        self.stays = self._start()
        self.goes = self._start()

    def _start(self) -> Worker:
        model = self.options.engine == "model"
        flags = {"engine": self.options.engine, "scripted_tokens_per_second": 60, "reply_give_up_seconds": 120}
        slow = {"max_num_seqs": 16, "streaming_timeout_ms": 60_000, "first_token_timeout_ms": 600_000}
        flags |= slow if model else {}  # a prompt waits while the other worker loads its model
        return self.workers.start(self.server.bootstrap_servers, **flags)

    async def until_ready(self) -> None:
        for worker in (self.stays, self.goes):
            await self.workers.until_serving(worker, seconds=180)

    async def send(self, count: int) -> None:
        text = self.options.text
        for _ in range(count):
            mode, cls = self.chance.choice(("chunks", "final", "both")), self.chance.choice(CLASSES)
            await self.ledger.send(1, text, mode=mode, cls=cls)

    async def knee(self) -> float:
        """Prompts a second out of a full queue."""
        began = time.monotonic()
        await self.send(MEASURE_PROMPTS)
        await self.ledger.until_settled(seconds=600)
        return MEASURE_PROMPTS / (time.monotonic() - began)

    async def fault(self) -> None:
        """One of them, at random."""
        name = self.chance.choice(("kill", "term", "restart", "stop", "broker clean", "broker kill"))
        await self.workers.until_serving(self.goes, seconds=180)  # a fault hits one that works
        self.faults[name] = self.faults.get(name, 0) + 1
        print(f"{time.monotonic() - self.began:.0f} s: {name}", flush=True)
        match name:
            case "kill":
                await self.workers.kill(self.goes)
                self.goes = self._start()
            case "term":
                assert await self.workers.end(self.goes, seconds=90) == 0
                self.goes = self._start()
            case "restart":
                self.goes.signal(signal.SIGUSR2)
            case "stop":
                self.goes.signal_all(signal.SIGSTOP)
                await asyncio.sleep(12)
                self.goes.signal_all(signal.SIGCONT)
            case "broker clean" | "broker kill":
                await asyncio.to_thread(self.server.stop if name == "broker clean" else self.server.kill)
                await asyncio.to_thread(self.server.start)

    async def run(self, rate: float) -> None:
        ends, due, next_fault = time.monotonic() + 60 * self.options.minutes, time.monotonic(), FAULT_SECONDS
        next_fault += due
        fault: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as faults:
            while (now := time.monotonic()) < ends:
                if now >= next_fault:
                    next_fault = now + FAULT_SECONDS
                    if fault is None or fault.done():  # one after another: a worker may take longer to load its model
                        self.ledger.fault()
                        fault = faults.create_task(self.fault())
                while due <= now:
                    with suppress(TimeoutError):
                        await self.send(1)
                    due += 1 / rate
                await self.ledger.read(min(0.2, 1 / rate))
        await self.ledger.until_settled(seconds=300)
        await self.ledger.until_committed(seconds=60)


async def main(options: argparse.Namespace) -> int:
    async with AsyncExitStack() as leaving:
        folder = options.out
        folder.mkdir(parents=True, exist_ok=True)
        server = leaving.enter_context(KafkaServer(folder / "kafka"))
        prefix = f"s{uuid.uuid4().hex[:8]}"
        model = options.engine == "model"
        ledger = Ledger(server.bootstrap_servers, prefix, any_text=model, max_tokens=32 if model else MAX_TOKENS)
        await create_topics(ledger.broker.admin(), topics_of(ledger.names, max_body_bytes=4_000_000))
        await ledger.start()
        leaving.push_async_callback(ledger.stop)
        workers = Workers(prefix, folder)
        leaving.callback(workers.stop)
        soak = Soak(server, ledger, workers, options)
        await soak.until_ready()
        knee = await soak.knee()
        rate = knee * options.load
        before = soak.stays.rss_bytes
        print(f"the worker that stays has {before / 1e6:.0f} MB")
        print(f"knee {knee:.2f} prompts/s, sending {rate:.2f}/s for {options.minutes} minutes", flush=True)
        try:
            await soak.run(rate)
        finally:
            await tell_open(ledger)
        after = soak.stays.rss_bytes
        row = ledger.row("soak")
        print(f"faults: {', '.join(f'{name} {count}' for name, count in sorted(soak.faults.items()))}")
        print(f"sent {row.num_sent}, right {row.num_right}, duplicates {row.num_duplicates}, lost {row.num_lost}")
        print(f"memory of the worker that stayed: {before / 1e6:.0f} MB at the start, {after / 1e6:.0f} MB at the end")
        return 0 if row.num_lost == 0 and row.num_right == row.num_sent else 1


async def tell_open(ledger: Ledger) -> None:
    """Each prompt without an answer, and what is committed of its partition."""
    for name, entry in ledger.entries.items():
        if not entry.answer.settled:
            commit = await ledger.commit_of(entry.where)
            print(f"no answer: {name} at {entry.where} offset {entry.offset}, attempts {entry.attempts}, {commit}")


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--engine", choices=("model", "scripted"), default="model")
    parser.add_argument("--load", type=float, default=0.5, help="share of what they can carry")
    parser.add_argument("--text", default="Say something about the sea. [[tokens=60]]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="logs of workers and broker; kept")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(options_of(sys.argv[1:]))))
