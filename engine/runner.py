"""Runs a scheduled batch on the model: plain rows to tensors, forward, sample. Decides nothing."""

from collections.abc import Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from engine.batch import Layers, SampledRow, ScheduledBatch, ScheduledRow
from engine.cache.layer_stream import LayerStream
from engine.config import EngineConfig
from engine.inputs import ModelInputs
from engine.kv_memory import KVCacheMemory
from engine.layer_windows import LayerWindows, StreamedPass
from engine.models.layers import ForwardPass, Model
from engine.sampler import Sampler, SamplingRow
from kernels.api import BestOutputs


class TorchRunner:
    """`ModelRunner` over a model and its KV cache, one call after the other (a CPU has no run-ahead)."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self._model = model
        self._segments = tuple((layer, layer + 1) for layer in range(model.spec.num_layers))
        self._block_size, self._max_model_len = config.block_size, config.max_model_len
        spec = model.cache_spec(config.block_size, config.kv_cache_dtype, config.kv_cache_group_size)
        self.cache = KVCacheMemory(spec, config.num_blocks, config.num_tail_slots)
        self._sampler = Sampler(model.spec.vocab_size)
        self._stream: LayerStream | None = None
        self._windows: LayerWindows | None = None
        self._passes: dict[int, tuple[ForwardPass, KVCacheMemory | StreamedPass]] = {}
        self._rows: list[ScheduledRow] = []
        self._sampling: list[SamplingRow] = []
        self._outputs: Tensor | BestOutputs = torch.empty(0)  # logits, or what is taken of them
        self._sampled: list[SampledRow] = []

    def stream_from(self, stream: LayerStream) -> None:
        """Rows may have cold blocks from now on, which come from there."""
        self._stream = stream

    def segments(self, batch: ScheduledBatch) -> Sequence[Layers]:
        """One layer each: a call per layer costs a CPU nothing."""
        return self._segments

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, layers: Layers) -> None:
        """Run the layers of one segment for all rows; raises whatever the model raises, and forgets the batch then."""
        first, last = layers
        state, cache = self._passes.pop(batch.batch_id) if first else self._begin(batch)
        if isinstance(cache, StreamedPass):
            self._advance_streamed(state, cache, layers)
        else:
            self._model.advance(state, cache, last)
        if last < self._model.spec.num_layers:
            self._passes[batch.batch_id] = state, cache
            return
        self._rows = [row for row in batch.rows if row.sample]
        self._sampling = [_sampling_row(row) for row in self._rows]
        if not self._rows:
            return
        need_logits = any(row.needs_logits for row in self._sampling)
        self._outputs = self._model.finish(state) if need_logits else self._model.choose(state)

    def _begin(self, batch: ScheduledBatch) -> tuple[ForwardPass, KVCacheMemory | StreamedPass]:
        if not batch.is_streamed:
            return self._model.begin(model_inputs(batch, self._block_size)), self.cache
        (row,) = batch.rows
        assert self._stream is not None, "a row has cold blocks, and there is nothing that they could come from"
        num_blocks = len(row.cold_hashes) + len(row.block_table)
        if self._windows is None or self._windows.num_blocks < num_blocks:
            self._windows = None  # the old ones go before there are new ones
            self._windows = LayerWindows.for_blocks(self.cache, self._blocks_at_end(row))
        whole = ScheduledBatch([replace(row, block_table=list(range(num_blocks)))], batch.batch_id)
        state = self._model.begin(model_inputs(whole, self._block_size))
        return state, StreamedPass(self._windows, self._stream, row, self._block_size)  # reads begin: nothing may fail

    def _blocks_at_end(self, row: ScheduledRow) -> int:
        num_tokens = min(len(row.prompt_token_ids) + row.params.max_tokens, self._max_model_len)
        return max(-(-num_tokens // self._block_size), len(row.cold_hashes) + len(row.block_table))

    def _advance_streamed(self, state: ForwardPass, cache: StreamedPass, layers: Layers) -> None:
        try:
            for layer in range(*layers):
                cache.enter(layer)
                self._model.advance(state, cache, layer + 1)
                cache.leave(layer)
        except BaseException:  # whatever it was: the windows are used again
            cache.close()
            raise

    @torch.inference_mode()
    def sample(self) -> None:
        """A token, or an error, for every row that asked for one."""
        self._sampled = []
        if not self._rows:
            return
        if isinstance(self._outputs, BestOutputs):
            chosen = self._sampler.take(self._outputs, self._sampling)
        else:
            chosen = self._sampler.sample(self._outputs, self._sampling)
        for index, row in enumerate(self._rows):
            if index in chosen.errors:
                self._sampled.append(SampledRow(row.request_id, None, error=chosen.errors[index]))
                continue
            logprobs = chosen.logprobs[index]
            self._sampled.append(
                SampledRow(
                    row.request_id,
                    chosen.token_ids[index],
                    logprob=logprobs[0] if logprobs else None,
                    top=tuple(logprobs[1]) if logprobs else (),
                )
            )

    def collect(self) -> list[SampledRow]:
        return self._sampled


def _sampling_row(row: ScheduledRow) -> SamplingRow:
    return SamplingRow(
        params=row.params,
        choice=row.choice,
        position=len(row.output_token_ids),
        prompt_token_ids=row.prompt_token_ids,
        output_token_ids=row.output_token_ids,
    )


def model_inputs(batch: ScheduledBatch, block_size: int) -> ModelInputs:
    """Tensors of a batch: tokens of all rows one after the other, block tables padded with block 0.

    Sequences are ordered so that those behind one prefix are neighbours, which attention may read once for all of them;
    `logit_rows` keep the order of the batch.
    """
    order = sorted(range(len(batch.rows)), key=lambda index: _sharing_key(batch.rows[index], block_size))
    token_ids: list[int] = []
    positions: list[int] = []
    query_starts, kv_lens = [0], []
    last_rows = [0] * len(batch.rows)
    width = max(len(row.block_table) for row in batch.rows)
    tables = numpy.zeros((len(batch.rows), width), dtype=numpy.int64)
    for s, index in enumerate(order):
        row = batch.rows[index]
        token_ids += row.token_ids
        positions += range(row.start, row.start + len(row.token_ids))
        query_starts.append(len(token_ids))
        kv_lens.append(row.start + len(row.token_ids))
        tables[s, : len(row.block_table)] = row.block_table
        last_rows[index] = len(token_ids) - 1
    return ModelInputs(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        query_starts=query_starts,
        kv_lens=kv_lens,
        block_tables=torch.from_numpy(tables),
        tail_slots=[batch.rows[index].tail_slot for index in order],
        logit_rows=torch.tensor(
            [last for last, row in zip(last_rows, batch.rows, strict=True) if row.sample], dtype=torch.int64
        ),
        block_size=block_size,
    )


def _sharing_key(row: ScheduledRow, block_size: int) -> tuple[int, list[int]]:
    """Rows with a past come first, by their blocks; those at the start of their sequence have nothing to share."""
    return (0 if row.start >= block_size else 1, row.block_table)
