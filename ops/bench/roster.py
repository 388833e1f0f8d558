"""Which engines there are, where each is installed, and in which environment its process runs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".cache" / "peers"
OURS = "v4flash"


@dataclass(frozen=True, slots=True)
class Entry:
    """`needs` are files under .cache/peers that `make peers` makes; an entry that lacks one is named as missing."""

    python: Path
    precisions: tuple[str, ...]
    needs: tuple[str, ...] = ()
    environment: Callable[[int], dict[str, str]] = lambda threads: {"OMP_NUM_THREADS": str(threads)}
    kept: bool = False  # loads for minutes: one process serves all workloads, its peak memory is reset between them

    def missing(self) -> list[str]:
        return [str(path) for path in (self.python, *(PEERS / need for need in self.needs)) if not path.exists()]


def vllm_environment(threads: int) -> dict[str, str]:
    """All cores bound to the engine, which runs in the process that asks; by default it would leave a core idle."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # its saved graphs cannot be loaded again with this torch
        "VLLM_CACHE_ROOT": str(PEERS / "vllm-cache"),
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(PEERS / "vllm/lib/libiomp5.so"),
    }


_OURS_PYTHON = ROOT / ".venv/bin/python"
ROSTER: dict[str, Entry] = {
    OURS: Entry(_OURS_PYTHON, ("bf16", "int8", "fp32")),
    "transformers": Entry(_OURS_PYTHON, ("bf16", "fp32"), ("weights/hf/model.safetensors",)),
    "llama.cpp": Entry(
        PEERS / "llamacpp/venv/bin/python",
        ("bf16", "int8"),
        ("llamacpp/VERSION", "llamacpp/build/bin/llama-server", "weights/bf16.gguf", "weights/q8_0.gguf"),
    ),
    "OpenVINO": Entry(
        PEERS / "openvino/bin/python",
        ("bf16", "int8", "fp32"),
        ("weights/openvino-fp32/openvino_model.bin", "weights/openvino-int8/openvino_model.bin"),
    ),
    "vLLM": Entry(
        PEERS / "vllm/bin/python",
        ("bf16", "int8", "fp32"),
        ("weights/hf/model.safetensors", "weights/hf-w8a8/model.safetensors", "vllm/lib/libiomp5.so"),
        vllm_environment,
        kept=True,
    ),
}
ORACLE = Entry(_OURS_PYTHON, ("fp32",), ROSTER["transformers"].needs)


def num_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
