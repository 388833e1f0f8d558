"""A sequence that is larger than the KV memory gives the tokens that it gives in a memory that holds it."""

import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from engine.api import PriorityClass
from engine.cache.block import root_hash
from engine.cache.layer_stream import LayerStream, PartLoad
from engine.cache.opening import open_transfers
from engine.cache.spec import KVDtypeChoice
from engine.checkpoint.bundled import bundled_model_path
from engine.config import ColdConfig, EngineConfig
from engine.core import EngineCore
from engine.door import Door
from engine.inputs import ModelInputs
from engine.layer_windows import LayerWindows
from engine.models import load_model
from engine.models.layers import ForwardPass, Model
from engine.request import Request
from engine.runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.step_result import StepResult
from engine.text.tokenizer import load_tokenizer
from kernels.api import Kernels
from kernels.cpu.kernels import TorchKernels

ROOT = root_hash(tenant="", model_digest="m", layout_id="l")
TEXT = "The tide comes in twice a day because the moon pulls at the water of the sea, and so the harbour fills. "
NUM_TOKENS = 12
SMALL, LARGE = 16, 64  # blocks of 8 tokens


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(bundled_model_path(), dtype="fp32")


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    """21 blocks and a piece, where the small memory has 16."""
    return load_tokenizer(bundled_model_path()).encode_text(TEXT * 12)[:171]


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


def run(core: EngineCore, request: Request, *, door: Door | None = None, preempt: bool = False) -> None:
    """To its end; with `preempt` it loses all that it has in memory after each token."""
    core.add(request)
    until = time.monotonic() + 300
    while core.has_work and time.monotonic() < until:
        result = core.step(door)
        assert not result.errors
        if preempt and result.advanced:
            core.preempt_if_running(request.request_id)
            core.cache.pool.evict_all()
        if not result.advanced:
            time.sleep(0.0005)
    assert not core.has_work, core.scheduler


def request(name: str, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True), ROOT)


@pytest.fixture(scope="module")
def expected(model: Model, prompt: tuple[int, ...]) -> list[int]:
    whole = request("whole", prompt)
    run(open_core(model, None), whole)
    return whole.output_token_ids


class EveryLayerDoor:
    """Hands in an urgent prompt of its own between any two layers of a token in the lane."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.num_added, self.num_answered = core, 0, 0

    def look(self) -> None:
        long = self.core.scheduler.lane.request
        if long is not None and long.is_decoding:
            self.num_added += 1
            urgent = request(f"u{self.num_added}", (self.num_added, 5, 7), 1)
            urgent.priority = PriorityClass.URGENT
            self.core.add(urgent)

    def publish(self, result: StepResult) -> None:
        self.num_answered += len(result.finished)


def streamed_bytes(core: EngineCore) -> int:
    cold = core.stats().cold
    assert cold is not None
    return cold.streamed_bytes_total


def windows_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple["weakref.ref[LayerWindows]", int]]:
    """All windows from now on, with their groups of layers; no older ones may be there when new ones are made."""
    made: list[tuple[weakref.ref[LayerWindows], int]] = []
    make = LayerWindows.__init__

    def recorded(self: LayerWindows, *args: Any) -> None:
        assert not any(windows() for windows, _ in made)
        make(self, *args)
        made.append((weakref.ref(self), len(self.groups)))

    monkeypatch.setattr(LayerWindows, "__init__", recorded)
    return made


@pytest.mark.model
@pytest.mark.parametrize(("share", "num_groups"), [(0.25, 30), (0.5, 6), (2.0, 2), (4.0, 1)])
def test_a_sequence_larger_than_the_memory_gives_the_same_tokens(
    share: float,
    num_groups: int,
    model: Model,
    prompt: tuple[int, ...],
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its oldest blocks are read from the SSD in every step, the same bytes in the same form, however many layers come
    in one read."""
    monkeypatch.setattr("engine.layer_windows.MEMORY_SHARE", share)
    monkeypatch.setattr("engine.layer_windows.GROWTH_BLOCKS", 64 if share < 0.5 else 8)
    made = windows_made(monkeypatch)
    core = open_core(model, tmp_path)
    streamed = request("streamed", prompt)
    run(core, streamed)
    assert streamed.output_token_ids == expected and streamed_bytes(core) > 0
    assert [groups for _, groups in made] == [num_groups]
    core.close()


@pytest.mark.model
def test_windows_are_made_once_for_a_sequence_and_old_ones_go_before(
    model: Model, prompt: tuple[int, ...], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have room for all that it may write; a larger sequence after it does not find memory taken twice."""
    monkeypatch.setattr("engine.layer_windows.GROWTH_BLOCKS", 1)
    made = windows_made(monkeypatch)
    core = open_core(model, tmp_path)
    first, larger = request("first", prompt[:-8], 2), request("larger", prompt)
    run(core, first)
    run(core, larger)
    assert larger.output_token_ids == expected and len(made) == 2
    core.close()


@pytest.mark.model
def test_a_step_that_fails_before_its_first_layer_has_begun_no_read(
    model: Model, prompt: tuple[int, ...], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came late would lie in the windows of the step that is tried again."""
    core = open_core(model, tmp_path)
    streamed, begin, fetch = request("streamed", prompt, 2), model.begin, LayerStream.fetch
    num_fetches, at_failure = [0], list[int]()

    def counted(self: LayerStream, *args: Any) -> PartLoad:
        num_fetches[0] += 1
        return fetch(self, *args)

    def fail_once(inputs: ModelInputs) -> ForwardPass:
        long = core.scheduler.lane.request
        if long is not None and long.num_cold_blocks and not at_failure:
            at_failure.append(num_fetches[0])
            raise RuntimeError("made to fail")
        return begin(inputs)

    monkeypatch.setattr(LayerStream, "fetch", counted)
    monkeypatch.setattr(model, "begin", fail_once)
    run(core, streamed)
    assert streamed.output_token_ids == expected[:2] and at_failure == [0]
    core.close()


@pytest.mark.model
@pytest.mark.parametrize("kernels", [None, TorchKernels()], ids=["native", "torch"])
def test_int8_blocks_give_the_same_tokens_from_the_ssd_as_from_memory(
    kernels: Kernels | None, prompt: tuple[int, ...], tmp_path: Path
) -> None:
    """With the compiled operations and with torch alone: no operation knows of it."""
    model = load_model(bundled_model_path(), dtype="fp32", kernels=kernels)
    whole, streamed = request("whole", prompt, 4), request("streamed", prompt, 4)
    run(open_core(model, None, "int8"), whole)
    core = open_core(model, tmp_path, "int8")
    run(core, streamed)
    assert streamed.output_token_ids == whole.output_token_ids and streamed_bytes(core) > 0
    core.close()


@pytest.mark.model
def test_it_goes_on_after_a_preemption_and_a_restart_with_what_the_ssd_has(
    model: Model, prompt: tuple[int, ...], expected: list[int], tmp_path: Path
) -> None:
    """Taken off the device after every token, and then asked again of a new process."""
    core = open_core(model, tmp_path)
    streamed = request("streamed", prompt)
    run(core, streamed, preempt=True)
    assert streamed.output_token_ids == expected and streamed.num_preemptions == NUM_TOKENS - 1
    core.close()
    core = open_core(model, tmp_path)
    again = request("again", prompt)
    run(core, again)
    assert again.output_token_ids == expected and again.num_loaded_tokens > 100
    core.close()


@pytest.mark.model
def test_urgent_prompts_run_inside_its_steps_at_every_layer(
    model: Model, prompt: tuple[int, ...], expected: list[int], tmp_path: Path
) -> None:
    """It goes on as if nothing had been, and they are answered at once."""
    core = open_core(model, tmp_path)
    door, streamed = EveryLayerDoor(core), request("streamed", prompt, 2)
    run(core, streamed, door=door)
    assert streamed.output_token_ids == expected[:2] and streamed_bytes(core) > 0
    assert door.num_answered >= 29
    core.close()
