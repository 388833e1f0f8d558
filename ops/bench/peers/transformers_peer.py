"""transformers' batched generate on the same weights: left padding, greedy, one static batch."""

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from workloads import Prompt

from engine.checkpoint.gguf import read_gguf


class TransformersPeer:
    """Its tokens arrive when a step of the whole batch is done; the first-token time is taken by a streamer."""

    name = f"transformers {transformers.__version__}"

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        config, tensors = read_gguf(path)
        settings = {key: value for key, value in config.items() if key != "architectures"}
        self._model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        self._model.load_state_dict(tensors, strict=False)
        self._model.tie_weights()
        self._model = self._model.to(dtype).eval()

    @torch.inference_mode()
    def run(self, prompts: list[Prompt]) -> tuple[list[list[int]], list[float], float]:
        """Output tokens, seconds to first token of each prompt, and seconds in all."""
        width = max(len(p.token_ids) for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, width - len(prompt.token_ids) :] = 1
        first: list[float] = []
        started = time.perf_counter()

        def clock(_: Any, scores: Any) -> Any:
            if not first:
                first.append(time.perf_counter() - started)
            return scores

        count = prompts[0].num_out
        out = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            logits_processor=[clock],
        )
        seconds = time.perf_counter() - started
        return out[:, width:].tolist(), first * len(prompts), seconds
