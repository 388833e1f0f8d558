"""OpenVINO GenAI's continuous batching, stepped in this process."""

import time

import numpy
import openvino
import openvino_genai
from api import Clock, Prompt, Setup

PRECISIONS = {
    "bf16": ("openvino-fp32", {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}),
    "int8": (
        "openvino-int8",
        {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "u8", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "64"},
    ),
    "fp32": ("openvino-fp32", {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}),
}


class OpenVinoPeer:
    def __init__(self, setup: Setup) -> None:
        folder, properties = PRECISIONS[setup.precision]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        self.settings = properties | {"cache_size": "1 GB", "max_num_batched_tokens": "2048", "prefix caching": "on"}
        self.name = f"openvino-genai {openvino_genai.__version__.split('-')[0]}"
        threads = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(setup.threads)}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            setup.weights / folder, scheduler, "CPU", properties | threads
        )
        self._next_id = 0

    def _add(self, token_ids: tuple[int, ...] | list[int], config: openvino_genai.GenerationConfig) -> object:
        self._next_id += 1
        ids = openvino.Tensor(numpy.array([token_ids], dtype=numpy.int64))
        return self._pipeline.add_request(self._next_id, ids, config)

    def generate(self, prompts: list[Prompt]) -> Clock:
        clock = Clock(len(prompts))
        started = time.perf_counter()
        handles = [
            self._add(p.token_ids, openvino_genai.GenerationConfig(max_new_tokens=p.num_out, ignore_eos=True))
            for p in prompts
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - started
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        clock.arrived(index, list(output.generated_ids), now)
        return clock

    def negative_log_likelihood(self, windows: list[list[int]]) -> float | None:
        """From the log probabilities that `echo` gives for the prompt."""
        total, count = 0.0, 0
        for window in windows:
            config = openvino_genai.GenerationConfig(max_new_tokens=1, ignore_eos=True, echo=True, logprobs=1)
            handle = self._add(window, config)
            scores: list[float] = []
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                while handle.can_read():
                    for output in handle.read().values():
                        scores += list(output.generated_log_probs)
            if len(scores) < len(window):
                return None
            total -= sum(scores[1 : len(window)])
            count += len(window) - 1
        return total / count

    def close(self) -> None:
        pass
