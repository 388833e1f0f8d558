"""One engine in a process of its own: a JSON line in, a JSON line out, until standard input ends.

python serve.py '{"engine": "llamacpp", "precision": "int8", "workload": "W2", "threads": 2, "peers": ".cache/peers"}'

{"prompts": [[[1, 2], 64]]} is answered by outputs, first, last; {"windows": [[1, 2]]} by nll; a failure by error.
What the engine prints goes to standard error.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from api import Prompt, Setup

ADAPTERS = {
    "v4flash": ("v4flash_peer", "V4flashPeer"),
    "transformers": ("transformers_peer", "TransformersPeer"),
    "llama.cpp": ("llamacpp_peer", "LlamaCppPeer"),
    "OpenVINO": ("openvino_peer", "OpenVinoPeer"),
    "vLLM": ("vllm_peer", "VllmPeer"),
    "oracle": ("oracle", "Oracle"),
}


def answer(adapter: Any, task: dict[str, Any]) -> dict[str, Any]:
    if "judge" in task:
        return {"gaps": adapter.gaps(task["judge"], task["outputs"])}
    if "windows" in task:
        return {"nll": adapter.negative_log_likelihood(task["windows"])}
    clock = adapter.generate([Prompt(tuple(ids), num_out) for ids, num_out in task["prompts"]])
    return {"outputs": clock.outputs, "first": clock.first, "last": clock.last}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    options = json.loads(sys.argv[1])
    module, name = ADAPTERS[options.pop("engine")]
    options["peers"] = Path(options["peers"])
    try:
        adapter = getattr(importlib.import_module(module), name)(Setup(**options))
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    reply({"name": adapter.name, "settings": adapter.settings})
    try:
        for line in sys.stdin:
            try:
                reply(answer(adapter, json.loads(line)))
            except Exception as error:
                traceback.print_exc()
                reply({"error": f"{type(error).__name__}: {error}"})
    finally:
        adapter.close()


if __name__ == "__main__":
    main()
