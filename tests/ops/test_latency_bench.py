"""The latency benchmark judges what it says it judges; the texts of the labels show nothing that they ask for."""

import asyncio
from types import ModuleType
from typing import Any

BENCH_MODULES = ("percentiles", "workloads", "static_batching", "latency", "topic_texts")


def rows(few: tuple[float, float], many: tuple[float, float]) -> dict[int, dict[str, Any]]:
    return {n: {"p95": p95, "output_tokens_per_second": rate} for n, (p95, rate) in ((16, few), (64, many))}


def test_a_goal_is_held_or_named(bench: dict[str, ModuleType]) -> None:
    """Growth of p95 against half of static batching's, and throughput that must not fall."""
    verdict, static = bench["latency"].verdict, rows((2.0, 10.0), (8.0, 20.0))
    ratios, missed = verdict({"v4flash": rows((1.0, 100.0), (2.0, 101.0)), "static batching": static}, 16, 64)
    assert missed == [] and list(ratios.values()) == [2.0, 4.0, 1.01]
    _, missed = verdict({"v4flash": rows((1.0, 100.0), (2.1, 99.0)), "static batching": static}, 16, 64)
    assert len(missed) == 2 and "2.10, more than 0.5 of 4.00" in missed[0] and "0.99" in missed[1]


async def test_a_closed_loop_never_has_more_prompts_open_than_clients(bench: dict[str, ModuleType]) -> None:
    """Each client sends its next prompt when it has its answer; first tokens keep the order of the prompts."""
    latency, most, num_open = bench["latency"], 0, 0

    async def ask(name: str, asked: Any) -> list[int]:
        nonlocal most, num_open
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0)
        num_open -= 1
        return [asked.tokens[0]] * asked.num_out

    prompts = latency.mixed(list(range(5000)), 12, "test", longest=200, longest_answer=9)
    measured = latency.Measured()
    await latency.closed_loop(ask, prompts, 3, measured)
    assert most == 3 and len(measured.seconds) == 12
    assert measured.first_tokens == [asked.tokens[0] for asked in prompts]


def test_no_text_that_is_asked_for_has_a_part_of_one_that_was_shown(bench: dict[str, ModuleType]) -> None:
    """So a label is told by what a text says, and not found by its words."""
    texts = bench["topic_texts"]
    for label in texts.LABELS:
        shown, asked = texts.shown(label, 8), texts.asked(label)
        parts = {part for column in texts.PARTS[label] for part in column if any(part in text for text in shown)}
        assert len(shown) == len(set(shown)) == 8 and len(asked) == len(set(asked)) == 64
        assert len(parts) == 6 and not any(part in text for text in asked for part in parts)
