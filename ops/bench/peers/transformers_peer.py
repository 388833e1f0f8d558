"""transformers' batched generate on the same weights: left padding, greedy, one static batch."""

import time
from typing import Any

import torch
import transformers
from api import Clock, Prompt, Setup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TransformersPeer:
    """Its tokens arrive when a step of the whole batch is done; a logits processor takes the time of each step."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.settings = {"attention": "sdpa"}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.weights / "hf", dtype=DTYPES[setup.precision], attn_implementation="sdpa", local_files_only=True
        ).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[Prompt]) -> Clock:
        width, count = max(len(p.token_ids) for p in prompts), prompts[0].num_out
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, width - len(prompt.token_ids) :] = 1
        steps: list[float] = []
        started = time.perf_counter()

        def timed(_: Any, scores: Any) -> Any:
            steps.append(time.perf_counter() - started)
            return scores

        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
            logits_processor=[timed],
        )
        seconds = time.perf_counter() - started
        clock = Clock(len(prompts))
        for index, tokens in enumerate(out[:, width:].tolist()):
            clock.arrived(index, tokens[:1], steps[0])
            clock.arrived(index, tokens[1:], seconds)
        return clock

    @torch.inference_mode()
    def negative_log_likelihood(self, windows: list[list[int]]) -> float:
        total, count = 0.0, 0
        for window in windows:
            ids = torch.tensor([window])
            logits = self.model(ids[:, :-1], use_cache=False).logits[0].float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += len(window) - 1
        return total / count

    def close(self) -> None:
        pass
