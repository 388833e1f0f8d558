"""What a token of a prompt costs on this device, measured before the first one comes."""

from collections.abc import Callable

from engine.batch import ScheduledBatch, ScheduledRow
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams

PROBE_TOKENS = 64


def measure_prefill(runner: ModelRunner, config: EngineConfig, clock: Callable[[], float]) -> tuple[int, float]:
    """Tokens and seconds of one prefill, in the first blocks, which must hold nothing yet."""
    limit = min(config.prefill_chunk_size, config.max_model_len, config.max_num_batched_tokens)
    num_tokens = min(PROBE_TOKENS, limit, config.num_blocks * config.block_size)
    table = list(range(-(-num_tokens // config.block_size)))
    tokens = [0] * num_tokens
    row = ScheduledRow("probe", 0, tokens, table, 0, False, SamplingParams(max_tokens=1), 0, tuple(tokens), [])
    for _ in range(2):  # the first one also makes what a model makes once
        batch, began = ScheduledBatch([row]), clock()
        for layers in runner.segments(batch):
            runner.launch(batch, layers)
        seconds = clock() - began
    return num_tokens, seconds
