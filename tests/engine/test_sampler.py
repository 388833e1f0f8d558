"""A token is a function of its row: logits, settings, seed, choice and position, never of the batch."""

import random

import pytest
import torch

from engine.sampler import Sampler, SamplingRow
from engine.sampling_params import SamplingParams
from kernels.cpu.sampling import best_outputs
from kernels.reference.sampling import philox, uniform

VOCABULARY = 200


def row(
    position: int = 0, choice: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: object
):
    return SamplingRow(SamplingParams(**params), choice, position, prompt, output)  # type: ignore[arg-type]


def logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    """The known answers of the Random123 distribution."""
    assert philox(torch.tensor([counter]), torch.tensor([key])).tolist() == [words]


def test_random_numbers_fill_the_unit_interval() -> None:
    """Never 1, mean a half, and another number for another seed, choice or position; any int is a seed."""
    numbers = uniform([7] * 4000, [0] * 4000, list(range(4000)))
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.02
    assert len(set(uniform([1, 2, 1, 1, -1, 2**63], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]).tolist())) == 6


def test_the_choice_is_the_same_in_every_batch() -> None:
    """Rows alone, together, and in another order get the same tokens."""
    table = logits(12)
    rows = [
        row(i, temperature=i % 4 * 0.5, top_p=0.9 if i % 3 else 1.0, top_k=20 if i % 2 else None, min_p=0.01, seed=i,
            frequency_penalty=i % 5 * 0.3, output=(1, 2, i), prompt=(4, 5), repetition_penalty=1.0 + i % 3 * 0.1)
        for i in range(12)
    ]  # fmt: skip
    sampler = Sampler(VOCABULARY)
    together = sampler.sample(table, rows).token_ids
    alone = [sampler.sample(table[i : i + 1], [rows[i]]).token_ids[0] for i in range(12)]
    order = list(range(12))
    random.Random(3).shuffle(order)
    mixed = sampler.sample(table[order], [rows[i] for i in order]).token_ids
    assert together == alone
    assert mixed == [together[i] for i in order]


def test_greedy_takes_the_best_token() -> None:
    """Temperature 0 is argmax, alone as beside a random row."""
    table = logits(2)
    chosen = Sampler(VOCABULARY).sample(table, [row(temperature=0.0), row(temperature=1.0)])
    assert chosen.token_ids[0] == int(table[0].argmax())


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 256, 1_025, 49_152, 49_157])
def test_greedy_rows_are_chosen_and_fail_each_by_itself(vocabulary: int) -> None:
    """The first of equal best tokens, an error for any bad value, wherever it is: alone, together, and with gaps."""
    table = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(5))
    table[0, [vocabulary // 2, vocabulary - 1]] = 9.0
    table[1] = 3.0
    table[2, -1] = 9.0
    table[4, -1], table[5, 0], table[6, vocabulary // 2] = torch.nan, torch.inf, -torch.inf
    table[7, 1], table[7, -1] = torch.inf, -torch.inf
    rows = [row(temperature=0.0)] * 9
    sampler = Sampler(vocabulary)
    expected = [table[i].tolist().index(float(table[i].max())) for i in (0, 1, 2, 3, 8)]
    assert expected[:3] == [vocabulary // 2, 0, vocabulary - 1]
    gaps = torch.full((9, 2 * vocabulary), torch.nan)
    gaps[:, ::2] = table
    for logits in (table, gaps[:, ::2]):
        together = sampler.sample(logits, rows)
        assert [together.token_ids[i] for i in (0, 1, 2, 3, 8)] == expected
        alone = [sampler.sample(logits[i : i + 1], rows[:1]) for i in range(9)]
        assert [one.token_ids[0] for one in alone] == together.token_ids
        assert [i for i, one in enumerate(alone) if one.errors] == list(together.errors) == [4, 5, 6, 7]
        taken = sampler.take(best_outputs(logits), rows)
        assert [taken.token_ids[i] for i in (0, 1, 2, 3, 8)] == expected
        with pytest.raises(ValueError, match="of 9 rows, expected 8"):
            sampler.take(best_outputs(logits), rows[1:])
        assert (taken.errors, taken.logprobs) == (together.errors, together.logprobs)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"seed": 3, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "stop": ("x",)}, False),
        ({"temperature": 1.0}, True),
        ({"logprobs": 0}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_the_best_token_is_enough_for_plain_greedy_rows(settings: dict[str, object], needed: bool) -> None:
    """Whatever changes the distribution or asks for it needs logits; filters of a draw do not."""
    assert row(**{"temperature": 0.0} | settings).needs_logits is needed


def test_draws_follow_the_probabilities() -> None:
    """Over 4,000 positions the shares of three tokens are what softmax says, within 3 points."""
    table = torch.tensor([0.5, 0.3, 0.2]).log().expand(4000, 3).contiguous()
    tokens = torch.tensor(Sampler(3).sample(table, [row(i, seed=11) for i in range(4000)]).token_ids)
    assert torch.allclose(tokens.bincount(minlength=3) / 4000, torch.tensor([0.5, 0.3, 0.2]), atol=0.03)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [({"top_k": 2}, {0, 1}), ({"top_p": 0.75}, {0, 1}), ({"top_p": 0.1}, {0}), ({"min_p": 0.5}, {0, 1})],
)
def test_filters_leave_the_likely_tokens(settings: dict[str, float], allowed: set[int]) -> None:
    """top_k counts, top_p sums to at least p, min_p is relative to the best; all that is left is drawn."""
    table = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(500, 4).contiguous()
    assert set(Sampler(4).sample(table, [row(i, **settings) for i in range(500)]).token_ids) == allowed


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"logit_bias": {2: 100.0}}, 2),
        ({"presence_penalty": 2.0, "output": (0,)}, 1),
        ({"frequency_penalty": 1.0, "output": (0, 0, 1)}, 2),
        ({"repetition_penalty": 3.0, "prompt": (0,)}, 1),
        ({"presence_penalty": 2.0, "prompt": (0,)}, 0),
    ],
)
def test_bias_and_penalties_move_the_choice(settings: dict[str, object], expected: int) -> None:
    """Presence and frequency look at the output, repetition at the prompt as well."""
    table = torch.tensor([[3.0, 2.0, 1.9]])
    before = table.clone()
    assert Sampler(3).sample(table, [row(temperature=0.0, **settings)]).token_ids == [expected]  # type: ignore[arg-type]
    assert torch.equal(table, before)


def test_a_banned_token_is_never_chosen() -> None:
    """Not even when it is the best by far."""
    banned = SamplingRow(SamplingParams(temperature=0.0), 0, 0, banned_token_ids=(0,))
    assert Sampler(3).sample(torch.tensor([[99.0, 2.0, 1.0]]), [banned]).token_ids == [1]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_bad_logits_fails_alone(poison: float, temperature: float) -> None:
    """The others choose what they choose without it."""
    table = logits(3)
    rows = [row(i, temperature=temperature, logprobs=2) for i in range(3)]
    sampler = Sampler(VOCABULARY)
    healthy = sampler.sample(table, rows)
    table[1, 17] = poison
    chosen = sampler.sample(table, rows)
    assert list(chosen.errors) == [1] and not healthy.errors
    assert [chosen.token_ids[i] for i in (0, 2)] == [healthy.token_ids[i] for i in (0, 2)]


def test_logprobs_are_those_of_the_model() -> None:
    """Before bias and temperature; as many alternatives as asked for, none for who asked for none."""
    table = logits(3)
    rows = [row(temperature=0.3, logprobs=3, logit_bias={9: 50.0}), row(logprobs=0), row()]
    chosen = Sampler(VOCABULARY).sample(table, rows)
    expected = table.log_softmax(dim=1)
    first, second, third = chosen.logprobs
    assert chosen.token_ids[0] == 9 and first is not None and second is not None and third is None
    assert first[0] == pytest.approx(float(expected[0, 9]))
    assert [token for token, _ in first[1]] == expected[0].topk(3).indices.tolist()
    assert second[1] == []


def test_extreme_settings_still_give_a_token() -> None:
    """The smallest temperature and top_p behave as greedy."""
    table = logits(1)
    for settings in ({"temperature": 1e-300}, {"temperature": 1e-4}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert Sampler(VOCABULARY).sample(table, [row(**settings)]).token_ids == [int(table.argmax())]


def test_the_alternatives_of_a_row_do_not_depend_on_how_many_its_mates_ask_for() -> None:
    """Also among equal logits, of which a longer list may name other ones first."""
    sampler = Sampler(5_000)
    rows = [row(temperature=0.0, logprobs=2), row(temperature=0.0, logprobs=20), row(temperature=0.0, logprobs=0)]
    for seed in range(20):
        table = (torch.randn(3, 5_000, generator=torch.Generator().manual_seed(seed)) * 2).round()
        together = sampler.sample(table, rows).logprobs
        assert together == [sampler.sample(table[i : i + 1], [rows[i]]).logprobs[0] for i in range(3)]


def test_the_choices_of_one_request_differ() -> None:
    """Equal seeds and positions, other choice: other random numbers."""
    table = torch.zeros(64, VOCABULARY)
    first, second = (
        Sampler(VOCABULARY).sample(table, [row(i, choice, seed=3) for i in range(64)]).token_ids for choice in (0, 1)
    )
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 8


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    """Two of four equal tokens hold a half exactly; a third one is not needed."""
    table = torch.zeros(300, 4)
    assert set(Sampler(4).sample(table, [row(i, top_p=0.5) for i in range(300)]).token_ids) == {0, 1}
