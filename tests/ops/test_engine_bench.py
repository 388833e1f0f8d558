"""The pure parts of the engine benchmark: what is counted, what is refused, and what the machine allows."""

from pathlib import Path
from types import ModuleType

import pytest

BENCH_MODULES = (
    "limits",
    "percentiles",
    "quality",
    "report",
    "workloads",
    "turns",
    "link",
    "roster",
    "peers",
    "peers.api",
)


def prompts(bench: dict[str, ModuleType], lengths: list[int], num_out: int, prefix: int = 0) -> list[object]:
    make = bench["peers.api"].Prompt
    return [make((0,) * prefix + (row + 1,) * (length - prefix), num_out) for row, length in enumerate(lengths)]


def test_an_output_agrees_up_to_the_first_token_that_is_no_tie(bench: dict[str, ModuleType]) -> None:
    """A token within a thousandth of the best logit is as good as the best; after a real difference nothing counts."""
    quality = bench["quality"]
    assert quality.same_share([0.0, 0.0009, 0.0, 0.0]) == 1
    assert quality.same_share([0.0, 0.0011, 0.0, 0.0]) == 0.25
    assert quality.agreement([[0.0, 0.0], [1.0, 0.0]]) == 0.5


def test_speed_is_refused_below_nine_tenths_of_the_best_peers_agreement(bench: dict[str, ModuleType]) -> None:
    """The best peer sets the mark; without a peer or a judgement there is nothing to compare with."""
    refusal = bench["quality"].refusal
    assert refusal(0.73, [0.5, 0.8]) is None
    assert "0.710" in refusal(0.71, [0.5, 0.8])
    assert refusal(0.1, []) is None
    assert refusal(None, [0.9]) is None


@pytest.mark.parametrize(("precision", "decode"), [("fp32", 58.5), ("bf16", 117.1), ("int8", 230.4)])
def test_one_stream_is_bound_by_reading_all_weights(
    bench: dict[str, ModuleType], precision: str, decode: float
) -> None:
    """At 32 GB/s the bounds of one stream are memory over the bytes of weights and cache of a step."""
    limits = bench["limits"]
    machine = limits.Machine({"fp32": 234e9, "bf16": 465e9, "int8": 935e9}, 32e9)
    bound = limits.bound(prompts(bench, [128], 128), precision, machine)
    assert 127 / bound.decode == pytest.approx(decode, rel=0.01)


def test_a_shared_prefix_is_paid_for_once(bench: dict[str, ModuleType]) -> None:
    """Sixty-four prompts that share 512 tokens are far cheaper to read than sixty-four that share none."""
    limits = bench["limits"]
    machine = limits.Machine({"bf16": 465e9}, 32e9)
    shared, own = (prompts(bench, [544] * 64, 16, prefix) for prefix in (512, 0))
    assert limits.shared_prefix(shared) == 512
    assert limits.shared_prefix(own) == 0
    assert limits.bound(own, "bf16", machine).prefill > 10 * limits.bound(shared, "bf16", machine).prefill


def test_rates_count_prompts_until_the_last_first_token_and_answers_until_the_end(
    bench: dict[str, ModuleType],
) -> None:
    """Prefill ends when no prompt waits any more; the decode rate leaves out the first token, which prefill gave."""
    rates = bench["report"].rates
    assert rates("W1", 128, 128, 1.0, 2.0) == {"decode": 127}
    assert rates("W3", 1000, 100, 4.0, 5.0) == {"prefill": 250, "total": 220}


def test_percentiles_are_values_that_occurred(bench: dict[str, ModuleType]) -> None:
    percentile = bench["percentiles"].percentile
    assert [percentile([4.0, 1.0, 3.0, 2.0], q) for q in (50, 95, 99)] == [2.0, 4.0, 4.0]
    assert percentile([7.0], 50) == 7.0


def entry(seconds: float, agreement: float) -> dict[str, object]:
    run = {"first": [0.5 * seconds], "last": [seconds]}
    return {"name": "x", "settings": {}, "runs": [run], "peak_mb": 10.0, "agreement": agreement, "num_judged": 1}


def test_ratio_and_share_compare_with_the_best_peer_and_with_the_machine(bench: dict[str, ModuleType]) -> None:
    """The best peer's ratio is 1, ours is relative to it, and the share is relative to what the machine allows."""
    report, limits = bench["report"], bench["limits"]
    machine = limits.Machine({"bf16": 465e9}, 32e9)
    runs = {"v4flash": entry(2.0, 0.9), "slow": entry(8.0, 1.0), "best": entry(4.0, 0.8)}
    part = report.summary("W1", "bf16", runs, [prompts(bench, [128], 128)], machine)
    engines = part["engines"]
    assert engines["v4flash"]["ratio"]["decode"] == pytest.approx(2)
    assert engines["best"]["ratio"]["decode"] == pytest.approx(1)
    assert engines["v4flash"]["share"]["decode"] == pytest.approx(127 / part["limit"]["decode"])


def test_a_refused_mode_has_no_speed_in_the_table(bench: dict[str, ModuleType]) -> None:
    """Ours at half the agreement of the best peer: the row and the reason stay, the figure goes."""
    report, limits = bench["report"], bench["limits"]
    machine = limits.Machine({"bf16": 465e9}, 32e9)
    results = report.Results()
    runs = {"v4flash": entry(2.0, 0.4), "peer": entry(4.0, 0.8)}
    results.add("W1", "bf16", report.summary("W1", "bf16", runs, [prompts(bench, [128], 128)], machine))
    text = report.table(results)
    assert "| W1 | bf16 | v4flash | not shown |" in text
    assert "ours in bf16 is not shown" in text
    assert "| W1 | bf16 | peer | decode 64 |" in text


def test_a_share_above_one_is_said_to_be_a_fault_of_the_limit(bench: dict[str, ModuleType]) -> None:
    """An engine cannot beat the machine; the better of two measurements is kept, and what is left is named."""
    report, limits = bench["report"], bench["limits"]
    busy, quiet = limits.Machine({"bf16": 1e9}, 1e9), limits.Machine({"bf16": 465e9}, 0.5e9)
    assert busy.at_best(quiet) == limits.Machine({"bf16": 465e9}, 1e9)
    results = report.Results()
    results.add(
        "W1", "bf16", report.summary("W1", "bf16", {"peer": entry(4.0, 1.0)}, [prompts(bench, [128], 128)], busy)
    )
    assert "W1 bf16: faster than the limit" in report.table(results)


def test_another_repetition_has_other_prompts_of_the_same_shape(bench: dict[str, ModuleType]) -> None:
    """No engine can answer a repetition from what it kept of another; the same repetition is the same for all."""
    make, tokens = bench["workloads"].make, list(range(20_000))
    for name, count in (("W1", 1), ("W2", 64), ("W3", 16), ("W4", 64)):
        first, again, other = make(name, tokens, 0), make(name, tokens, 0), make(name, tokens, 1)
        assert first == again
        assert first != other
        assert len(first) == len(other) == count


def test_likelihood_windows_score_16384_tokens(bench: dict[str, ModuleType]) -> None:
    """Each window has one token more than it scores."""
    pieces = bench["workloads"].windows(list(range(100_000)))
    assert sum(len(piece) - 1 for piece in pieces) == 16_384
    assert len({tuple(piece) for piece in pieces}) == 16


def test_an_answer_of_another_length_is_a_failure(bench: dict[str, ModuleType]) -> None:
    """A rate over fewer tokens than the others had would not be the same measurement."""
    with pytest.raises(bench["link"].EngineFailedError, match="answers of"):
        bench["turns"].check_lengths([[1, 2], [1]], prompts(bench, [4, 4], 2))


def test_what_make_peers_has_not_set_up_is_named(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """The first missing file of an engine tells why it is left out."""
    roster = bench["roster"]
    absent = roster.Entry(tmp_path / "python", ("bf16",), ("weights/none",))
    assert [Path(file).name for file in absent.missing()] == ["python", "none"]
