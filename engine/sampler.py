"""One vectorised pass from logits to tokens for rows with settings of their own. Keeps no state between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams
from kernels.api import BestOutputs
from kernels.cpu.sampling import draw, finite_rows, greedy
from kernels.reference import sampling

# Below this a temperature is greedy: the best token has all the probability that float32 can tell.
_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the choice of one token depends on, beside its logits. `position` counts the tokens of the output so far."""

    params: SamplingParams
    choice: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    @property
    def is_adjusted(self) -> bool:
        """Whether the row chooses from another distribution than the model's own."""
        return bool(self.has_penalties or self.params.logit_bias or self.banned_token_ids)

    @property
    def needs_logits(self) -> bool:
        """Whether more than the best token of the model's own distribution is asked for."""
        return not self.is_greedy or self.is_adjusted or self.params.logprobs is not None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """By row: the token; if asked for, its log probability with the best alternatives (of the model's own distribution,
    before bias, penalties and temperature). `errors` has the rows that failed, whose token means nothing."""

    token_ids: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]] | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Chooses tokens; a row's choice is the same whatever else is in the batch."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """A token for each row of logits [R, V] float32, which are not changed. A row with NaN or infinity among its
        logits fails alone. Raises ValueError when the shape is another."""
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, expected {(len(rows), self._vocab_size)}")
        if not rows:
            return SampledTokens([], [])
        finite = finite_rows(logits)
        errors = _errors(finite)
        if errors:
            logits = torch.where(finite[:, None], logits, 0.0)
        chosen = self._choose(_adjusted(logits, rows), rows)
        return SampledTokens(chosen.tolist(), _logprobs(logits, chosen, rows), errors)

    @staticmethod
    def take(best: BestOutputs, rows: Sequence[SamplingRow]) -> SampledTokens:
        """What `sample` gives for rows none of which needs logits. Raises ValueError when there are more or fewer."""
        if len(best.ids) != len(rows):
            raise ValueError(f"there are best tokens of {len(best.ids)} rows, expected {len(rows)}")
        assert not any(row.needs_logits for row in rows)
        return SampledTokens(best.ids.tolist(), [None] * len(best.ids), _errors(best.are_finite))

    @staticmethod
    def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        random = [index for index, row in enumerate(rows) if not row.is_greedy]
        if not random:
            return greedy(logits)
        params = [rows[index].params for index in random]
        drawn = draw(
            logits if len(random) == len(rows) else logits[random],
            torch.tensor([p.temperature for p in params]),
            torch.tensor([p.top_k or logits.shape[1] for p in params]),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor([p.min_p for p in params], dtype=torch.float64),
            sampling.uniform(
                [p.seed for p in params], [rows[i].choice for i in random], [rows[i].position for i in random]
            ),
        )
        if len(random) == len(rows):
            return drawn
        chosen = greedy(logits)
        chosen[random] = drawn
        return chosen


def _errors(finite: Tensor) -> dict[int, str]:
    return dict.fromkeys((~finite).nonzero().flatten().tolist(), "the model gave logits that are not finite")


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits after bias, penalties and bans; the same tensor when no row has any."""
    changed = [i for i, row in enumerate(rows) if row.is_adjusted]
    if not changed:
        return logits
    part = logits[changed]
    own = [rows[index] for index in changed]
    biases = [(i, token, bias) for i, row in enumerate(own) for token, bias in row.params.logit_bias.items()]
    _add(part, biases)
    penalised = [index for index, row in enumerate(own) if row.has_penalties]
    if penalised:
        asked = [own[index] for index in penalised]
        part[penalised] = sampling.penalise(
            part[penalised],
            sampling.token_counts([list(row.prompt_token_ids) for row in asked], logits.shape[1]),
            sampling.token_counts([list(row.output_token_ids) for row in asked], logits.shape[1]),
            torch.tensor([row.params.repetition_penalty for row in asked]),
            torch.tensor([row.params.frequency_penalty for row in asked]),
            torch.tensor([row.params.presence_penalty for row in asked]),
        )
    _add(part, [(i, token, -torch.inf) for i, row in enumerate(own) for token in row.banned_token_ids])
    adjusted = logits.clone()
    adjusted[changed] = part
    return adjusted


def _add(logits: Tensor, values: Sequence[tuple[int, int, float]]) -> None:
    """Add each (row, token, value) in place."""
    if values:
        rows, tokens, amounts = zip(*values, strict=True)
        logits.index_put_((torch.tensor(rows), torch.tensor(tokens)), torch.tensor(amounts), accumulate=True)


def _logprobs(
    logits: Tensor, chosen: Tensor, rows: Sequence[SamplingRow]
) -> list[tuple[float, list[tuple[int, float]]] | None]:
    found: list[tuple[float, list[tuple[int, float]]] | None] = [None] * len(rows)
    wanted = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
    if not wanted:
        return found
    indexes = list(wanted)
    logprobs = logits[indexes].log_softmax(dim=1)
    own = logprobs.gather(1, chosen[indexes, None]).squeeze(1).tolist()
    # One list length at a time: which of equal tokens topk names depends on how many it is asked for.
    for count in set(wanted.values()):
        same = [place for place, index in enumerate(indexes) if wanted[index] == count]
        best = logprobs[same].topk(min(count, logits.shape[1]), dim=1)
        for place, ids, values in zip(same, best.indices.tolist(), best.values.tolist(), strict=True):
            found[indexes[place]] = (own[place], list(zip(ids, values, strict=True)))
    return found
