"""Request traces of the Mooncake format: when prompts came, how long they were, and which prefixes they share."""

import hashlib
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`hash_ids` name the blocks of 512 tokens that a prompt begins with; equal ids are equal content and past."""

    number: int
    arrival_seconds: float
    num_input: int
    num_output: int
    hash_ids: tuple[int, ...]

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Of the full blocks of the prompt. Raises ValueError where blocks of the trace are no multiple of a block."""
        if TRACE_BLOCK_TOKENS % block_size:
            raise ValueError(f"the block size must divide {TRACE_BLOCK_TOKENS}, got {block_size}")
        parts = range(TRACE_BLOCK_TOKENS // block_size)
        hashes = (_digest(hash_id, part) for hash_id in self.hash_ids for part in parts)
        return list(itertools.islice(hashes, self.num_input // block_size))


def read_trace(path: Path, *, limit: int, speed: float) -> list[TraceRequest]:
    """The first `limit` requests, which arrive `speed` times as fast as they did."""
    with path.open() as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, limit)]
    return [
        TraceRequest(
            number,
            row["timestamp"] / 1000 / speed,
            row["input_length"],
            max(1, row["output_length"]),
            tuple(row["hash_ids"]),
        )
        for number, row in enumerate(rows)
    ]


def long_answers(count: int, *, seconds_between: float) -> list[TraceRequest]:
    """Prompts of 32 to 256 tokens by Poisson whose answers are longer, a few of them very much; they share nothing."""
    rng, moment, requests = random.Random(11), 0.0, []
    for number in range(count):
        moment += rng.expovariate(1 / seconds_between)
        num_output = min(2000, max(16, int(rng.lognormvariate(5.2, 0.9))))
        requests.append(TraceRequest(number, moment, rng.randint(32, 256), num_output, (number,)))
    return requests


def infinite_cache_ratio(requests: Sequence[TraceRequest], block_size: int) -> float:
    """Share of prompt tokens that a cache of any size would have had, if each prompt were there before the next came.
    The last token of a prompt is always computed."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        known = sum(1 for _ in itertools.takewhile(seen.__contains__, request.hash_ids))
        usable = min(known * TRACE_BLOCK_TOKENS, (request.num_input - 1) // block_size * block_size)
        hits += usable
        seen.update(request.hash_ids)
    return hits / sum(request.num_input for request in requests)


def _digest(hash_id: int, part: int) -> bytes:
    return hashlib.blake2b(f"{hash_id}/{part}".encode(), digest_size=32).digest()
