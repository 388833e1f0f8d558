"""Static batching: transformers' `generate` over all that wait, padded on the left, all answered together."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WEIGHTS = Path(__file__).parents[2] / ".cache" / "peers" / "weights" / "hf"


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and how long its answer is."""

    tokens: tuple[int, ...]
    num_out: int


class StaticBatching:
    """bf16 with SDPA and a cache that grows; every row runs until the longest answer is complete. `deadline` is when
    a batch gives up with TimeoutError."""

    def __init__(self) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            WEIGHTS, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).eval()
        for layer in self._model.model.layers:
            layer.register_forward_pre_hook(self._look_at_the_clock)
        self._waiting: list[tuple[Asked, asyncio.Future[list[int]]]] = []
        self._news = asyncio.Event()
        self.deadline = float("inf")
        self.name_and_version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.num_wanted = self.num_computed = 0  # token positions: asked for by somebody, and run

    async def ask(self, asked: Asked) -> list[int]:
        answered: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answered))
        self._news.set()
        return await answered

    async def serve(self) -> None:
        """Batch after batch until cancelled."""
        while True:
            await self._news.wait()
            await asyncio.sleep(0)  # the clients that were just answered ask again first
            self._news.clear()
            batch, self._waiting = self._waiting, []
            prompts = [asked for asked, _ in batch]
            try:
                answers = await asyncio.to_thread(self._generate, prompts)
            except TimeoutError as error:
                for _, answered in batch:
                    answered.set_exception(error)
                continue
            for (_, answered), tokens in zip(batch, answers, strict=True):
                answered.set_result(tokens)

    def _look_at_the_clock(self, *_: Any) -> None:
        """Before each layer, since the first step of a large batch alone may take minutes."""
        if time.perf_counter() > self.deadline:
            raise TimeoutError

    @torch.inference_mode()
    def _generate(self, batch: list[Asked]) -> list[list[int]]:
        width, steps = max(len(asked.tokens) for asked in batch), max(asked.num_out for asked in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, asked in enumerate(batch):
            ids[row, width - len(asked.tokens) :] = torch.tensor(asked.tokens)
            mask[row, width - len(asked.tokens) :] = 1

        out = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=steps,
            max_new_tokens=steps,
            pad_token_id=0,
            eos_token_id=None,
        )
        self.num_wanted += sum(len(asked.tokens) + asked.num_out for asked in batch)
        self.num_computed += len(batch) * (width + steps)
        return [row[: asked.num_out] for row, asked in zip(out[:, width:].tolist(), batch, strict=True)]
