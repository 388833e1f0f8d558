"""A sequence that is larger than the KV memory gives the tokens that it gives in a memory that holds it."""

import time
from pathlib import Path

import pytest

from engine.cache.block import root_hash
from engine.cache.opening import open_transfers
from engine.cache.spec import KVDtypeChoice
from engine.checkpoint.bundled import bundled_model_path
from engine.config import ColdConfig, EngineConfig
from engine.core import EngineCore
from engine.models import load_model
from engine.models.layers import Model
from engine.request import Request
from engine.runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import load_tokenizer

ROOT = root_hash(tenant="", model_digest="m", layout_id="l")
TEXT = "The tide comes in twice a day because the moon pulls at the water of the sea, and so the harbour fills. "
NUM_TOKENS = 12
SMALL, LARGE = 16, 64  # blocks of 8 tokens


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(bundled_model_path(), dtype="fp32")


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    """30 blocks: nearly twice the small memory."""
    return load_tokenizer(bundled_model_path()).encode_text(TEXT * 12)[:243]


def open_core(model: Model, directory: Path | None, kv_cache_dtype: KVDtypeChoice = "auto") -> EngineCore:
    """A small memory with an SSD, or a large one without."""
    config = EngineConfig(
        block_size=8,
        num_blocks=LARGE if directory is None else SMALL,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_dtype=kv_cache_dtype,
        cold=None if directory is None else ColdConfig((directory,), 256 << 20),
    )
    runner = TorchRunner(model, config)
    transfers = None if config.cold is None else open_transfers(config.cold, runner.cache)
    core = EngineCore(config, runner, transfers=transfers, check=True)
    core.warm_up()
    return core


def run(core: EngineCore, *requests: Request) -> None:
    for request in requests:
        core.add(request)
    until = time.monotonic() + 60
    while core.has_work and time.monotonic() < until:
        result = core.step()
        assert not result.errors
        if not result.advanced:
            time.sleep(0.0005)
    assert not core.has_work, core.scheduler


def request(name: str, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True), ROOT)


@pytest.mark.model
@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "int8"])
def test_a_sequence_larger_than_the_memory_gives_the_same_tokens(
    model: Model, prompt: tuple[int, ...], kv_cache_dtype: KVDtypeChoice, tmp_path: Path
) -> None:
    """Its oldest blocks are read from the SSD in every step, the same bytes in the same form."""
    whole = request("whole", prompt)
    run(open_core(model, None, kv_cache_dtype), whole)
    core = open_core(model, tmp_path, kv_cache_dtype)
    streamed = request("streamed", prompt)
    run(core, streamed)
    assert streamed.output_token_ids == whole.output_token_ids
    cold = core.stats().cold
    assert cold is not None and cold.streamed_bytes_total > 0
    core.close()
