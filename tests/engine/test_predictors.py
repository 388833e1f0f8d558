"""Guesses from history stay bounded, in value and in memory."""

from engine.cache.block import root_hash
from engine.predictors import OutputLengthPredictor
from engine.request import Request
from engine.sampling_params import SamplingParams

ROOT = root_hash(tenant="", model_digest="m", layout_id="l")


def ended(tenant: str, num_output: int, max_tokens: int = 100) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request("r", (1,), params, ROOT, tenant=tenant, output_token_ids=[0] * num_output)


def test_history_is_taken_by_tenant_and_bounded_by_max_tokens() -> None:
    """Without history the answer is max_tokens; with it a quantile, never more than what is left."""
    lengths = OutputLengthPredictor(min_samples=4)
    for _ in range(8):
        lengths.observe(ended("a", 10))
    assert lengths.remaining_tokens(ended("a", 0)) == 10
    assert lengths.remaining_tokens(ended("a", 3)) == 7
    assert lengths.remaining_tokens(ended("a", 0, max_tokens=5)) == 5
    assert lengths.remaining_tokens(ended("b", 0)) == 100


def test_an_overrun_is_expected_to_last_as_long_as_the_longer_ones_did_or_to_the_limit() -> None:
    """Past all of its history a request may take all that it is allowed."""
    lengths = OutputLengthPredictor(min_samples=4)
    for num_output in [2] * 4 + [50] * 4:
        lengths.observe(ended("a", num_output))
    assert lengths.remaining_tokens(ended("a", 0)) == 50
    assert lengths.remaining_tokens(ended("a", 10)) == 40
    assert lengths.remaining_tokens(ended("a", 60)) == 40


def test_tenants_without_end_take_no_memory_without_end() -> None:
    """Neither asking nor answering keeps more than the histories that were used last."""
    lengths = OutputLengthPredictor(max_histories=3)
    for index in range(50):
        lengths.remaining_tokens(ended(f"asks{index}", 0))
        lengths.observe(ended(f"t{index}", 1))
    assert repr(lengths) == "OutputLengthPredictor(histories=3)"
