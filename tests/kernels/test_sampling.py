"""Fast choices are those of the readable twin, over the whole vocabulary."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu import sampling as fast
from kernels.reference import sampling as twin

NAN, INF = float("nan"), float("inf")
VOCAB = 4_000
WIDTHS = [1, 2, 255, 256, 257, 511, 512, 513, 1_000, 49_152, 49_157]
SETTINGS = [
    # temperature, top_k, top_p, min_p
    (1.0, VOCAB, 1.0, 0.0),
    (0.7, VOCAB, 0.9, 0.0),
    (1.3, 40, 1.0, 0.0),
    (1.0, 300, 1.0, 0.0),
    (1.0, 300, 0.5, 0.0),
    (1.0, VOCAB, 0.95, 0.05),
    (1.0, VOCAB, 1.0, 0.0005),
    (5.0, VOCAB, 0.99, 0.0),
    (0.01, 1, 0.1, 0.5),
]


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_draw_from_candidates_is_that_from_the_whole_vocabulary(scale: float, rounded: bool) -> None:
    """For every kind of setting, for flat and peaked logits, and for those with many equal values."""
    torch.manual_seed(int(scale * 10))
    count = 40 * len(SETTINGS)
    logits = torch.randn(count, VOCAB) * scale
    logits = logits.round() if rounded else logits
    temperature, top_k, top_p, min_p = zip(*(SETTINGS[row % len(SETTINGS)] for row in range(count)), strict=True)
    columns = (
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
        twin.uniform(list(range(count)), [0] * count, [3] * count),
    )
    ours, theirs = fast.draw(logits, *columns), twin.draw(logits, *columns)
    assert (ours != theirs).sum() <= 1, "more than one choice on a border between two tokens"


def test_a_row_is_drawn_the_same_beside_any_others() -> None:
    """Rows that need the full sort do not change those that do not."""
    torch.manual_seed(1)
    logits = torch.cat([torch.randn(4, VOCAB) * 8, torch.zeros(4, VOCAB)])
    uniform = twin.uniform(list(range(8)), [0] * 8, [0] * 8)

    def drawn(rows: list[int]) -> list[int]:
        n = len(rows)
        ones = torch.ones(n, dtype=torch.float64)
        return fast.draw(
            logits[rows], torch.ones(n), torch.full((n,), VOCAB), ones, torch.zeros(n).double(), uniform[rows]
        ).tolist()

    together = drawn(list(range(8)))
    assert together == [drawn([row])[0] for row in range(8)]
    assert together[::-1] == drawn(list(range(7, -1, -1)))


def hard_rows(width: int) -> Tensor:
    """[R, width] with many or only equal values, zeros of both signs, and a large or bad value at each border."""
    torch.manual_seed(width)
    zeros = torch.where(torch.arange(width) < width // 2, -1.0, torch.tensor([-0.0, 0.0]).repeat(width)[:width])
    rows = [torch.randn(width), (torch.randn(width) * 2).round(), torch.full((width,), -INF), zeros]
    for place in (0, 255, 256, 511, width - 2, width - 1):
        for value in (9.0, NAN, INF, -INF) if 0 <= place < width else ():
            row = torch.randn(width)
            row[[place, -1]] = value
            rows.append(row)
    opposite = torch.randn(width)
    opposite[0], opposite[-1] = INF, -INF
    return torch.stack([*rows, opposite])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_greedy_token_is_the_first_of_the_best(width: int) -> None:
    """For widths that leave any rest; a NaN counts as the best."""
    logits = hard_rows(width)
    tokens = fast.greedy(logits).tolist()
    assert tokens == twin.greedy(logits).tolist()
    numbers = [(row, token) for row, token in zip(logits.tolist(), tokens, strict=True) if not any(x != x for x in row)]
    assert [token for _, token in numbers] == [row.index(max(row)) for row, _ in numbers]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_is_finite_when_all_its_logits_are(width: int) -> None:
    """Wherever the bad one stands, and whichever it is."""
    logits = hard_rows(width)
    assert fast.finite_rows(logits).tolist() == twin.finite_rows(logits).tolist()


@pytest.mark.parametrize("choice", [fast.greedy, fast.finite_rows])
@pytest.mark.parametrize("width", [257, 1_000, 49_157])
def test_choices_need_no_contiguous_logits_nor_company(choice: Callable[[Tensor], Tensor], width: int) -> None:
    """Columns and rows with gaps, a transposed table, and each row alone give what the whole table gives."""
    logits = hard_rows(width)
    expected = choice(logits).tolist()
    gaps = torch.full((2 * len(logits), 2 * width), NAN)
    gaps[::2, ::2] = logits
    assert choice(gaps[::2, ::2]).tolist() == expected
    assert choice(logits.T.contiguous().T).tolist() == expected
    assert [int(choice(row[None])) for row in logits] == [int(value) for value in expected]


def test_large_finite_logits_are_finite_though_their_sum_is_not() -> None:
    """torch sums a lone row in another order, so sums that overflow here and not there must not decide."""
    torch.manual_seed(0)
    large = torch.randn(64, 49_152) * 1e36
    together, alone = large.sum(dim=1).isfinite(), torch.cat([row[None].sum(dim=1) for row in large]).isfinite()
    assert not together.all() and not alone.all(), "no sum overflows: the test shows nothing"
    assert fast.finite_rows(large).all() and all(fast.finite_rows(row[None]) for row in large)


def test_no_rows_have_no_choices() -> None:
    """An empty table gives empty answers."""
    assert fast.greedy(torch.empty(0, VOCAB)).tolist() == fast.finite_rows(torch.empty(0, VOCAB)).tolist() == []
