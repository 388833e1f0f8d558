"""What this machine can do at most, and what that allows a workload. `python limits.py` prints the measurement."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.api import Prompt

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
CACHE_BYTES = {"fp32": 4, "bf16": 2, "int8": 2}  # int8 weights, bf16 keys and values


@dataclass(frozen=True, slots=True)
class Machine:
    """Operations a second of large linears by precision, and bytes a second read from memory."""

    operations: dict[str, float]
    bandwidth: float

    def at_best(self, other: "Machine") -> "Machine":
        """The higher of two measurements: neighbours can only take away from what the machine can do."""
        operations = {name: max(rate, other.operations[name]) for name, rate in self.operations.items()}
        return Machine(operations, max(self.bandwidth, other.bandwidth))


@dataclass(frozen=True, slots=True)
class Model:
    """Parameter counts of the linears and of the head, and the numbers that attention costs by."""

    linear: int
    head: int
    layers: int
    query_width: int
    kv_width: int  # keys and values of a token and layer


SMOLLM2 = Model(linear=106_168_320, head=28_311_552, layers=30, query_width=576, kv_width=384)


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds in which all prompts can be read, and all tokens after the first be written."""

    prefill: float
    decode: float


def shared_prefix(prompts: list[Prompt]) -> int:
    """Tokens that all of several prompts begin with."""
    columns = zip(*(prompt.token_ids for prompt in prompts), strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), 0) if len(prompts) > 1 else 0


def least_seconds(
    tokens: float, logits: int, pairs: float, kv_tokens: float, precision: str, machine: Machine, model: Model = SMOLLM2
) -> float:
    """Of a step over `tokens` rows, `logits` of which give logits, with `pairs` of a query and a key and `kv_tokens`
    keys and values read: each part takes the longer of its arithmetic and its bytes.

    Linears and attention follow one another, so their times add up. With int8 weights attention is bf16.
    """
    attention_peak = machine.operations["bf16" if precision == "int8" else precision]
    pair = 4 * model.query_width * model.layers  # operations of a query with a key
    cached = model.kv_width * model.layers * CACHE_BYTES[precision]
    weights = (model.linear + model.head) * WEIGHT_BYTES[precision]
    operations = 2 * model.linear * tokens + 2 * model.head * logits
    linear = max(operations / machine.operations[precision], weights / machine.bandwidth)
    return linear + max(pairs * pair / attention_peak, kv_tokens * cached / machine.bandwidth)


def bound(prompts: list[Prompt], precision: str, machine: Machine, model: Model = SMOLLM2) -> Bound:
    """A prefix that all share is computed and read once."""
    prefix, count = shared_prefix(prompts), len(prompts)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    own = [length - prefix for length in lengths]
    tokens = prefix + sum(own)
    pairs = prefix * (prefix + 1) / 2 + sum(n * (prefix + (n + 1) / 2) for n in own)
    prefill = least_seconds(tokens, count, pairs, tokens, precision, machine, model)
    steps = prompts[0].num_out - 1
    context = [length + (steps + 1) / 2 for length in lengths]
    kv_tokens = prefix + sum(length - prefix for length in context)
    step = least_seconds(count, count, sum(context), kv_tokens, precision, machine, model)
    return Bound(prefill, steps * step)


def best(work: Callable[[], Any], tries: int = 12) -> float:
    """Seconds of the fastest try."""
    fastest = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def measure_here() -> dict[str, Any]:
    """Linears of 1,024 rows by 2,048 by 2,048 with packed weights, and the sum of half a GiB."""
    import torch

    rows, width = 1024, 2048
    operations = 2 * rows * width * width
    result = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x, weight = torch.randn(rows, width, dtype=dtype), torch.randn(width, width, dtype=dtype)
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            linear = torch.ops.mkldnn._linear_pointwise
            result[name] = operations / best(lambda x=x, w=packed, f=linear: f(x, w, None, "none", [], ""))
        except RuntimeError:  # no packing for this format on this machine
            result[name] = operations / best(lambda x=x, w=weight: torch.nn.functional.linear(x, w))
    x = torch.randint(0, 255, (rows, width), dtype=torch.uint8)
    weight = torch.randint(-127, 127, (width, width), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [rows, width])
    scales, zeros = torch.full((width,), 0.01), torch.zeros(width, dtype=torch.int64)
    linear = torch.ops.onednn.qlinear_pointwise
    tail = (scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    result["int8"] = operations / best(lambda: linear(x, 1.0, 128, packed, *tail))
    block = torch.ones(2**27)
    return asdict(Machine(result, block.nbytes / best(block.sum)))


def measure(python: Path, threads: int) -> Machine:
    """In a process of its own, so that nothing of it stays in memory."""
    command = [str(python), str(Path(__file__))]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return Machine(**json.loads(done.stdout))


if __name__ == "__main__":
    # this folder has an engine.py, which torch's own imports must not meet
    sys.path.append(sys.path.pop(0))
    print(json.dumps(measure_here()))
