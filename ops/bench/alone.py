"""What the worker process alone can carry: a backlog on a real Kafka, the scripted engine at full speed."""

import asyncio
from pathlib import Path
from typing import Any

from broker import KafkaServer
from load import Ask, LoadClient, Reply, make_topics
from processes import CpuLog, start_worker

from engine.api import ChatMessage
from engine.scripted import ScriptedEngine, scripted_answer
from topics.names import TopicNames

ALONE = {
    "final, 16 tokens": {"mode": "final", "num_prompts": 4000, "num_tokens": 16, "coalesce": 8},
    "chunks, 64 tokens, 8 a chunk": {"mode": "chunks", "num_prompts": 1500, "num_tokens": 64, "coalesce": 8},
    "chunks, 64 tokens, 1 a chunk": {"mode": "chunks", "num_prompts": 400, "num_tokens": 64, "coalesce": 1},
}


async def measure_alone(server: KafkaServer, folder: Path, shape: str, number: int) -> dict[str, Any]:
    """A backlog that is there before the worker starts; rates are between the broker's first and last reply stamps."""
    what: dict[str, Any] = ALONE[shape]
    names = TopicNames(f"bench-{number}")
    await make_topics(server.bootstrap_servers, names)
    content = f"[[tokens={what['num_tokens']}]]"
    asks = [
        Ask(
            f"r{index}",
            "/v1/chat/completions",
            what["mode"],
            {"messages": [{"role": "user", "content": f"{index} {content}"}], "max_tokens": what["num_tokens"]},
        )
        for index in range(what["num_prompts"])
    ]
    async with LoadClient(server.bootstrap_servers, names) as client:
        await client.send(asks)
        worker = start_worker(
            folder / f"{names.prefix}.log",
            engine="scripted",
            scripted_tokens_per_second=1e6,
            stream_coalesce_tokens=what["coalesce"],
            stream_coalesce_ms=10_000,
            bootstrap_servers=server.bootstrap_servers,
            prefix=names.prefix,
            group_id=names.prefix,
            until_end=True,
        )
        with CpuLog({"worker": worker.pid, "broker": server.pid or 0}) as cpu:
            code = await asyncio.to_thread(worker.wait, 300)
        assert code == 0, (folder / f"{names.prefix}.log").read_text()[-2000:]
        replies = await client.follow(asks)
    check_scripted(asks, replies)
    stamps = sorted(stamp for reply in replies.values() for stamp in reply.appended)
    seconds = stamps[-1] - stamps[0]
    spent = {who: cpu.seconds(who, stamps[0], stamps[-1]) for who in ("worker", "broker")}
    return {
        "shape": shape,
        "prompts_per_second": len(asks) / seconds,
        "reply_records_per_second": len(stamps) / seconds,
        "seconds": seconds,
        "num_reply_records": len(stamps),
        "prompts_per_cpu_second": len(asks) / spent["worker"],
        "reply_records_per_cpu_second": len(stamps) / spent["worker"],
        "cpu_share": {who: used / seconds for who, used in spent.items()},
    }


def check_scripted(asks: list[Ask], replies: dict[str, Reply]) -> None:
    """Every prompt has one whole answer with the text that the scripted engine gives when called directly."""
    engine = ScriptedEngine()
    for ask in asks:
        text, _ = replies[ask.request_id].answer()
        tokens = engine.encode_chat([ChatMessage(**message) for message in ask.body["messages"]])
        assert text == scripted_answer(tokens, ask.body["max_tokens"]), ask.request_id
