"""Chooses the next token of every row in one vectorised pass. One bad row fails alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams
from kernels.reference.sampling import choose, uniform


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What decides one token: the request's settings, its choice, and how many tokens it has produced."""

    params: SamplingParams
    choice: int
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(slots=True)
class SampledTokens:
    """Per row: the token, its log probability with the best alternatives where asked for, or the error."""

    token_ids: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]] | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Greedy is argmax; everything else inverts a counter-based random number, the same in any batch."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """`logits` [R, V] float32, one row per entry of `rows`; log probabilities are those before penalties."""
        finite = logits.isfinite().all(-1)
        errors = dict.fromkeys((~finite).nonzero()[:, 0].tolist(), "the model gave logits that are not finite")
        if errors:
            logits = logits.masked_fill(~finite[:, None], 0.0)
        adjusted = self._adjusted(logits, rows)
        chosen = adjusted.argmax(-1)
        random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        if random:
            chosen[random] = self._random(adjusted[random], [rows[i] for i in random])
        token_ids: list[int] = chosen.tolist()
        return SampledTokens(token_ids, self._logprobs(logits, rows, token_ids), errors)

    def _random(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        params = [row.params for row in rows]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)

        def whole(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64)

        # a seed may be any Python integer: its low 63 bits count
        seeds = whole([p.seed & 0x7FFFFFFFFFFFFFFF for p in params])
        numbers = uniform(seeds, whole([row.choice for row in rows]), whole([row.position for row in rows]))
        return choose(
            logits,
            column([max(p.temperature, 1e-5) for p in params]),
            whole([p.top_k or self._vocab_size for p in params]),
            column([p.top_p for p in params]),
            column([p.min_p for p in params]),
            numbers,
        )

    def _adjusted(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Logits after repetition, presence and frequency penalties and biases; a copy only where one is set."""
        copied = False
        for index, row in enumerate(rows):
            p = row.params
            plain = p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 == p.frequency_penalty
            if plain and not p.logit_bias:
                continue
            if not copied:
                logits, copied = logits.clone(), True
            line = logits[index]
            if p.repetition_penalty != 1.0:
                seen = torch.tensor(sorted({*row.prompt_token_ids, *row.output_token_ids}))
                values = line[seen]
                line[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
            if row.output_token_ids:
                counts = torch.bincount(torch.tensor(list(row.output_token_ids)), minlength=self._vocab_size)
                line -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
            for token_id, bias in p.logit_bias.items():
                line[token_id] += bias
        return logits

    def _logprobs(
        self, logits: Tensor, rows: Sequence[SamplingRow], token_ids: list[int]
    ) -> list[tuple[float, list[tuple[int, float]]] | None]:
        found: list[tuple[float, list[tuple[int, float]]] | None] = [None] * len(rows)
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not wanted:
            return found
        table = logits[wanted].log_softmax(-1)
        values, ids = table.topk(min(20, self._vocab_size), dim=-1)
        for place, index in enumerate(wanted):
            count = rows[index].params.logprobs or 0
            best = list(zip(ids[place, :count].tolist(), values[place, :count].tolist(), strict=True))
            found[index] = (float(table[place, token_ids[index]]), best)
        return found
