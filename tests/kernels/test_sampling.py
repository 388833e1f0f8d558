"""The draw from candidates is the draw from the whole vocabulary."""

import pytest
import torch

from kernels.cpu import sampling as fast
from kernels.reference import sampling as twin

VOCAB = 4_000
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
