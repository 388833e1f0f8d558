"""Ours: the engine core stepped in this process, as its worker does from the engine thread."""

import time
from importlib.metadata import version

import torch
from api import Clock, Prompt, Setup

from engine.cache.block import root_hash
from engine.checkpoint.bundled import bundled_model_path
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.inputs import ModelInputs
from engine.kv_memory import KVCacheMemory
from engine.models import load_model
from engine.request import Request
from engine.runner import TorchRunner
from engine.sampling_params import SamplingParams

ROWS = 256  # tokens of a step of the likelihood: their logits take 50 MB


class V4flashPeer:
    def __init__(self, setup: Setup) -> None:
        kv_cache_dtype = "int8" if setup.precision == "int8" else "auto"  # OpenVINO keeps eight bits too
        self._config = EngineConfig(
            num_blocks=2048,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_model_len=2048,
            kv_cache_dtype=kv_cache_dtype,
        )
        self._model = load_model(bundled_model_path(), dtype=setup.precision)
        self._core: EngineCore | None = None
        self._root = root_hash(tenant="", model_digest="bench", layout_id="bench")
        self.name = f"v4flash {version('v4flash')}, torch {torch.__version__}"
        self.settings = {"max_num_batched_tokens": "1024", "kv_cache_dtype": kv_cache_dtype}

    def generate(self, prompts: list[Prompt]) -> Clock:
        if self._core is None:
            self._core = EngineCore(self._config, TorchRunner(self._model, self._config))
        core, clock = self._core, Clock(len(prompts))
        core.cache.pool.evict_all()
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=prompt.num_out, temperature=0, ignore_eos=True)
            core.add(Request(str(index), prompt.token_ids, params, self._root, arrival_seconds=index * 1e-6))
        while core.has_work:
            advanced = core.step().advanced
            now = time.perf_counter() - started
            for request, _ in advanced:
                index = int(request.request_id)
                clock.arrived(index, request.output_token_ids[len(clock.outputs[index]) :], now)
        return clock

    @torch.inference_mode()
    def negative_log_likelihood(self, windows: list[list[int]]) -> float:
        """Through the same paged cache and kernels as an answer, in prefill steps of ROWS tokens."""
        size = self._config.block_size
        num_blocks = -(-max(map(len, windows)) // size)
        spec = self._model.cache_spec(size, self._config.kv_cache_dtype, self._config.kv_cache_group_size)
        cache = KVCacheMemory(spec, num_blocks, num_tails=1)
        total, count = 0.0, 0
        for window in windows:
            for start in range(0, len(window) - 1, ROWS):
                part = window[start : min(start + ROWS, len(window) - 1)]
                inputs = ModelInputs(
                    token_ids=torch.tensor(part),
                    positions=torch.arange(start, start + len(part)),
                    query_starts=[0, len(part)],
                    kv_lens=[start + len(part)],
                    block_tables=torch.arange(num_blocks)[None],
                    tail_slots=[0],
                    logit_rows=torch.arange(len(part)),
                    block_size=size,
                )
                logits = self._model.forward(inputs, cache)
                target = torch.tensor(window[start + 1 : start + 1 + len(part)])
                total += float(torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum"))
                count += len(part)
        return total / count

    def close(self) -> None:
        pass
