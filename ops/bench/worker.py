"""The way through Kafka beside the engine called directly (W2), and what the worker process alone can carry.

python ops/bench/worker.py --parts w2,alone --repetitions 5 --out out/bench
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# this file must not hide the package of the same name: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]
sys.path.append(str(Path(__file__).parents[1] / "kafka"))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as a worker sets it, for both ways and before torch is imported

from alone import ALONE, measure_alone  # noqa: E402
from broker import KafkaServer  # noqa: E402
from direct import serve_direct  # noqa: E402
from load import Ask, LoadClient, make_topics  # noqa: E402
from percentiles import percentiles  # noqa: E402
from processes import cpu_seconds, start_worker  # noqa: E402
from workloads import corpus, make  # noqa: E402

from engine.checkpoint.bundled import bundled_model_path  # noqa: E402
from engine.text.tokenizer import load_tokenizer  # noqa: E402
from topics.names import TopicNames  # noqa: E402

NUM_OUT = 64


class ThroughKafka:
    """W2 on `v4flash worker` with the real model."""

    def __init__(self, client: LoadClient, pids: dict[str, int], mode: str) -> None:
        self._client, self._pids, self._mode = client, pids, mode

    async def run(self, texts: list[str], name: str) -> dict[str, Any]:
        body = {"max_tokens": NUM_OUT, "temperature": 0, "ignore_eos": True}
        asks = [
            Ask(f"{name}-{i}", "/v1/completions", self._mode, {"prompt": text, **body}) for i, text in enumerate(texts)
        ]
        before = {who: cpu_seconds(pid) for who, pid in self._pids.items()}
        began, cpu = time.time(), time.process_time()
        _, replies = await asyncio.gather(self._client.send(asks), self._client.follow(asks))
        seconds = max(reply.received[-1] for reply in replies.values()) - began
        spent = {who: cpu_seconds(pid) - before[who] for who, pid in self._pids.items()}
        answers = [replies[ask.request_id].answer() for ask in asks]
        return {
            "seconds": seconds,
            "cpu_seconds": {**spent, "client": time.process_time() - cpu},
            "num_tokens": [usage["completion_tokens"] for _, usage in answers],
            "num_prompt_tokens": [usage["prompt_tokens"] for _, usage in answers],
            "texts": [text for text, _ in answers],
            "first": [replies[ask.request_id].received[0] - began for ask in asks],
            "num_records": sum(len(reply.records) for reply in replies.values()),
        }


def directly(pipe: Any, texts: list[str]) -> dict[str, Any]:
    """The same prompts given to the engine's facade."""
    pipe.send((texts, NUM_OUT))
    answers, seconds, cpu = pipe.recv()
    return {
        "seconds": seconds,
        "cpu_seconds": {"engine": cpu},
        "num_tokens": [answer.num_tokens for answer in answers],
        "num_prompt_tokens": [answer.num_prompt_tokens for answer in answers],
        "texts": [answer.text for answer in answers],
        "first": [answer.first_token_seconds for answer in answers],
    }


async def measure_w2(server: KafkaServer, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One warm-up, then the two ways in turn, each time on other prompts; every answer's length is checked."""
    names = TopicNames("bench-w2")
    await make_topics(server.bootstrap_servers, names)
    tokenizer = load_tokenizer(bundled_model_path())
    tokens = corpus(tokenizer.encode_text)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    direct = context.Process(target=serve_direct, args=(theirs, {"dtype": options.dtype}), daemon=True)
    direct.start()
    flags = {"bootstrap_servers": server.bootstrap_servers, "prefix": names.prefix, "group_id": names.prefix}
    worker = start_worker(folder / "w2.log", **flags, dtype=options.dtype)
    runs: dict[str, list[dict[str, Any]]] = {"direct": [], "kafka": []}
    try:
        async with LoadClient(server.bootstrap_servers, names) as client:
            kafka = ThroughKafka(client, {"worker": worker.pid, "broker": server.pid or 0}, options.mode)
            for repetition in range(-1, options.repetitions):
                texts = [tokenizer.decode(list(prompt.token_ids)) for prompt in make("W2", tokens, repetition)]
                for way in ("direct", "kafka") if repetition % 2 else ("kafka", "direct"):
                    result = directly(pipe, texts) if way == "direct" else await kafka.run(texts, f"w2-{repetition}")
                    assert result["num_tokens"] == [NUM_OUT] * len(texts), "an answer has the wrong length"
                    if repetition >= 0:
                        runs[way].append(result)
    finally:
        worker.terminate()
        worker.wait(60)
        pipe.send(None)
        direct.join(60)
    assert [r["num_prompt_tokens"] for r in runs["direct"]] == [r["num_prompt_tokens"] for r in runs["kafka"]]
    same = [a == b for d, k in zip(*runs.values(), strict=True) for a, b in zip(d["texts"], k["texts"], strict=True)]
    report: dict[str, Any] = {"mode": options.mode, "dtype": options.dtype, "same_texts": statistics.mean(same)}
    for way, results in runs.items():
        report[way] = {
            "output_tokens_per_second": statistics.median(sum(r["num_tokens"]) / r["seconds"] for r in results),
            "seconds": [r["seconds"] for r in results],
            "first_token_seconds": percentiles([t for r in results for t in r["first"]]),
            "cpu_seconds": {
                who: statistics.median(r["cpu_seconds"][who] for r in results) for who in results[0]["cpu_seconds"]
            },
        }
    report["kafka"]["num_reply_records"] = [r["num_records"] for r in runs["kafka"]]
    report["ratios"] = [d["seconds"] / k["seconds"] for d, k in zip(*runs.values(), strict=True)]
    report["ratio"] = statistics.median(report["ratios"])
    return report


def print_w2(report: dict[str, Any]) -> None:
    direct, kafka = report["direct"], report["kafka"]
    print("W2: 64 requests at once, 50-200 tokens in, 64 out", report["mode"], report["dtype"])
    for name, way in (("engine called directly", direct), ("through Kafka", kafka)):
        spent = ", ".join(f"{who} {seconds:.1f}" for who, seconds in way["cpu_seconds"].items())
        first = way["first_token_seconds"]["p50"]
        rate = way["output_tokens_per_second"]
        print(f"  {name:24}{rate:7.0f} output tokens/s, first token p50 {first:.2f} s, CPU seconds: {spent}")
    each = ", ".join(f"{ratio:.2f}" for ratio in report["ratios"])
    print(f"  ratio {report['ratio']:.3f} ({each}); same texts {report['same_texts']:.2f}", flush=True)


def print_alone(report: dict[str, Any]) -> None:
    share = report["cpu_share"]
    print(
        f"  {report['shape']:30}{report['prompts_per_second']:7.0f} prompts/s{report['reply_records_per_second']:8.0f} "
        f"reply records/s; cores: worker {share['worker']:.2f}, broker {share['broker']:.2f}; a core second of the "
        f"worker: {report['prompts_per_cpu_second']:.0f} prompts, {report['reply_records_per_cpu_second']:.0f} records",
        flush=True,
    )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"machine": platform.machine(), "num_cores": os.cpu_count(), "command": sys.argv}
    with tempfile.TemporaryDirectory(prefix="bench.") as name, KafkaServer(Path(name) / "kafka") as server:
        if "w2" in options.parts:
            report["w2"] = await measure_w2(server, Path(name), options)
            print_w2(report["w2"])
        if "alone" in options.parts:
            print("the worker alone, scripted engine, backlog of prompts")
            report["alone"] = []
            for number, shape in enumerate(ALONE):
                report["alone"].append(await measure_alone(server, Path(name), shape, number))
                print_alone(report["alone"][-1])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="w2,alone", type=lambda text: text.split(","))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--mode", default="chunks", choices=["chunks", "final", "both"])
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # partitions of new topics have no leader for a moment
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave through the context managers: no broker stays behind
    report = asyncio.run(run(options))
    (options.out / "worker.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
