"""A prefix that went to the SSD and came back gives the tokens that it gave before."""

import time
from pathlib import Path

import pytest

from engine.cache.block import root_hash
from engine.cache.cold_admission import ColdAdmission
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
TEXT = (
    "The tide comes in twice a day because the moon pulls at the water of the sea, and so the harbour fills and falls. "
    "A consumer group divides the partitions of a topic among its members, and whoever leaves gives its share back."
)
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(bundled_model_path(), dtype="fp32")


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    return load_tokenizer(bundled_model_path()).encode_text(TEXT)


def open_core(model: Model, directory: Path | None, kv_cache_dtype: KVDtypeChoice = "auto") -> EngineCore:
    config = EngineConfig(
        block_size=8,
        num_blocks=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_dtype=kv_cache_dtype,
        cold=None
        if directory is None
        else ColdConfig((directory,), 256 << 20, admission=ColdAdmission.FIRST, has_deadline=False),
    )
    runner = TorchRunner(model, config)
    core = EngineCore(
        config, runner, transfers=None if config.cold is None else open_transfers(config.cold, runner.cache), check=True
    )
    core.warm_up()
    return core


def answer(core: EngineCore, name: str, prompt: tuple[int, ...], *, preempt: bool = False) -> Request:
    request = Request(name, prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0), ROOT)
    core.add(request)
    while core.has_work:
        result = core.step()
        assert not result.errors
        if preempt and result.advanced:
            core.preempt_if_running(name)
            drain(core)
            core.cache.pool.evict_all()
        if not result.advanced:
            time.sleep((core.rest_seconds and 0.001) or 0)
    return request


def drain(core: EngineCore) -> None:
    """Wait until all copies to the SSD are done."""
    cold = core.cache.cold
    assert cold is not None
    cold.copy_planned()
    until = time.monotonic() + 10
    while cold.transfers.num_unwritten and time.monotonic() < until:
        time.sleep(0.001)
    assert cold.transfers.num_unwritten == 0


@pytest.fixture(scope="module")
def expected(model: Model, prompt: tuple[int, ...]) -> list[int]:
    return answer(open_core(model, None), "plain", prompt).output_token_ids


@pytest.mark.model
def test_tokens_are_the_same_after_eviction_to_the_ssd_and_back(
    model: Model, prompt: tuple[int, ...], expected: list[int], tmp_path: Path
) -> None:
    """All full blocks of the prompt come from the SSD, and nothing else changes."""
    core = open_core(model, tmp_path)
    assert answer(core, "first", prompt).output_token_ids == expected
    drain(core)
    core.cache.pool.evict_all()
    again = answer(core, "again", prompt)
    assert again.output_token_ids == expected
    assert again.num_loaded_tokens == again.num_cached_tokens == (len(prompt) - 1) // 8 * 8
    core.close()


@pytest.mark.model
def test_a_new_process_finds_its_prefix_on_the_ssd(
    model: Model, prompt: tuple[int, ...], expected: list[int], tmp_path: Path
) -> None:
    """The store is rebuilt from the files alone."""
    core = open_core(model, tmp_path)
    answer(core, "first", prompt)
    core.close()
    core = open_core(model, tmp_path)
    again = answer(core, "again", prompt)
    assert again.output_token_ids == expected
    assert again.num_loaded_tokens == (len(prompt) - 1) // 8 * 8
    core.close()


@pytest.mark.model
def test_tokens_are_the_same_after_a_swap_at_every_step(
    model: Model, prompt: tuple[int, ...], expected: list[int], tmp_path: Path
) -> None:
    """Preempted after each token, with everything gone from memory: it goes on with what the SSD has."""
    core = open_core(model, tmp_path)
    assert answer(core, "swapped", prompt, preempt=True).output_token_ids == expected
    assert core.cache.cold is not None and core.cache.cold.loaded_blocks >= (NUM_TOKENS - 1) * (len(prompt) // 8)
    core.close()


@pytest.mark.model
def test_int8_blocks_give_the_same_tokens_from_the_ssd_as_from_memory(
    model: Model, prompt: tuple[int, ...], tmp_path: Path
) -> None:
    """A block is stored as memory holds it, scales included, and never rounded again."""
    core = open_core(model, tmp_path, "int8")
    first = answer(core, "first", prompt).output_token_ids
    drain(core)
    core.cache.pool.evict_all()
    again = answer(core, "again", prompt)
    assert again.output_token_ids == first and again.num_loaded_tokens == (len(prompt) - 1) // 8 * 8
    core.close()
