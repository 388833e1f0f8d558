"""The tokens of a request depend on the request alone: not on batch mates, chunks, preemption or the prefix cache."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.api import PriorityClass
from engine.cache.block import root_hash
from engine.cache.spec import KVDtypeChoice
from engine.checkpoint.bundled import bundled_model_path
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models import load_model
from engine.models.layers import Model
from engine.models.weight_mode import ModeName
from engine.request import Request
from engine.runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.step_result import StepResult
from engine.text.tokenizer import load_tokenizer

TIE = 1e-3  # two best logits closer than this are a coin toss between correct engines
ROOT = root_hash(tenant="", model_digest="m", layout_id="l")
TEXTS = [
    "The tide comes in twice a day because",
    "The tide comes in twice a day because the moon pulls at the water of the sea, and so the harbour",
    "A consumer group divides the partitions of a topic among its members. When a member leaves,",
    "def fibonacci(n):",
    "Once upon a time",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return bundled_model_path()


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load_model(path, dtype="fp32")


@pytest.fixture(scope="module")
def prompts(path: Path) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(path)
    return [tokenizer.encode_text(text) for text in TEXTS]


def run(
    model: Model,
    prompts: list[tuple[int, ...]],
    params: list[SamplingParams],
    *,
    chunk: int = 64,
    preempt: bool = False,
    caching: bool = True,
    together: bool = True,
    kv: KVDtypeChoice = "auto",
) -> list[list[int]]:
    config = EngineConfig(
        block_size=8,
        num_blocks=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prefill_chunk_size=chunk,
        enable_prefix_caching=caching,
        kv_cache_dtype=kv,
    )
    core = EngineCore(config, TorchRunner(model, config), check=True)
    requests = [Request(str(i), p, s, ROOT) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    for group in [requests] if together else [[r] for r in requests]:
        for request in group:
            core.add(request)
        while core.has_work:
            result = core.step()
            assert not result.errors
            if preempt and result.advanced:
                core.preempt_if_running(result.advanced[0][0].request_id)
    return [r.output_token_ids for r in requests]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_tokens_are_the_same_whether_logits_are_kept_or_not(
    path: Path, prompts: list[tuple[int, ...]], dtype: ModeName
) -> None:
    """A batch of plain greedy rows keeps the best tokens alone, one row that wants log probabilities needs all."""
    model = load_model(path, dtype=dtype)
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    asking = replace(plain, logprobs=0)
    for group in (prompts, prompts[:1]):
        without = run(model, group, [plain] * len(group))
        assert without == run(model, group, [asking, *[plain] * (len(group) - 1)])


@torch.inference_mode()
def is_tie(model: Model, tokens: list[int], kv: KVDtypeChoice) -> bool:
    """Whether the reference's two best next logits after `tokens` are within the tie bound."""
    config = EngineConfig(block_size=8, num_blocks=32, max_num_seqs=1, kv_cache_dtype=kv)
    runner = TorchRunner(model, config)
    core = EngineCore(config, runner)
    core.add(Request("r", tuple(tokens), SamplingParams(max_tokens=1, temperature=0, logprobs=2), ROOT))
    (_, row) = core.step().advanced[0]
    return row.top[0][1] - row.top[1][1] <= TIE


VARIANTS = {
    "alone": {"together": False},
    "chunks of 1": {"chunk": 1},
    "chunks of 7": {"chunk": 7},
    "chunks of 64, no prefix cache": {"caching": False},
    "preempted at every step": {"preempt": True},
    "preempted at every step, chunks of 7, no prefix cache": {"preempt": True, "chunk": 7, "caching": False},
}


@pytest.mark.model
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_tokens_do_not_depend_on_how_they_were_computed(
    variant: str, temperature: float, kv: KVDtypeChoice, model: Model, prompts: list[tuple[int, ...]]
) -> None:
    """Greedy and seeded tokens are the same in every variant; a greedy difference within 1e-3 is a tie."""
    params = [
        SamplingParams(max_tokens=10, temperature=temperature, seed=7 + i, top_p=0.95) for i in range(len(prompts))
    ]
    expected = run(model, prompts, params, kv=kv)
    got = run(model, prompts, params, kv=kv, **VARIANTS[variant])  # type: ignore[arg-type]
    num_ties = 0
    for prompt, ours, theirs in zip(prompts, got, expected, strict=True):
        if ours != theirs:
            same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            assert temperature == 0.0, f"seeded tokens differ at {same}"
            assert is_tie(model, [*prompt, *theirs[:same]], kv), f"tokens differ at {same} and it is no tie"
            num_ties += 1
    assert num_ties <= 1


class EveryLayerDoor:
    """Hands in an urgent prompt of its own between any two layers of any step."""

    def __init__(self, core: EngineCore, prompt: tuple[int, ...]) -> None:
        self.core, self.prompt = core, prompt
        self.num_added, self.num_answered = 0, 0

    def look(self) -> None:
        self.num_added += 1
        params = SamplingParams(max_tokens=1, temperature=0)
        prompt = (self.num_added, *self.prompt)
        self.core.add(Request(f"u{self.num_added}", prompt, params, ROOT, priority=PriorityClass.URGENT))

    def publish(self, result: StepResult) -> None:
        self.num_answered += len(result.finished)


@pytest.mark.model
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_a_step_that_is_interrupted_at_every_layer_goes_on_bit_for_bit(
    kv: KVDtypeChoice, model: Model, prompts: list[tuple[int, ...]]
) -> None:
    """Tokens and their log probabilities are the very same numbers as without the urgent prompts that ran inside."""
    config = EngineConfig(block_size=8, num_blocks=128, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_dtype=kv)
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=3)
    outcomes = []
    for interrupted in (False, True):
        core = EngineCore(config, TorchRunner(model, config), check=True)
        door = EveryLayerDoor(core, prompts[-1][:2]) if interrupted else None
        for index, prompt in enumerate(prompts[:2]):
            core.add(Request(str(index), prompt, params, ROOT))
        rows = []
        num_steps = 0
        while core.has_work:
            num_steps += 1
            rows += [(r.request_id, token) for r, token in core.step(door).advanced]
        if door is not None:
            assert door.num_added == door.num_answered == num_steps * (model.spec.num_layers - 1)
        outcomes.append(rows)
    assert outcomes[0] == outcomes[1]
