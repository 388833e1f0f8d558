"""Whether an int8 KV cache changes what a model says a text is: labels by the engine with fp16 and with int8 KV.

python ops/bench/kv_labels.py --items 200

Paragraphs of Python's own reference are prose or code; twelve labelled ones come first in every prompt, and the answer
is one token of two. Prints the agreement of the two runs and the F1 of each.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

# this file must not hide the packages of the same names: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]

from engine.cache.block import root_hash  # noqa: E402 (the path is set above)
from engine.cache.spec import KVDtypeChoice  # noqa: E402
from engine.checkpoint.bundled import bundled_model_path  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.core import EngineCore  # noqa: E402
from engine.models import load_model  # noqa: E402
from engine.models.layers import Model  # noqa: E402
from engine.request import Request  # noqa: E402
from engine.runner import TorchRunner  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402
from engine.text.tokenizer import load_tokenizer  # noqa: E402

LABELS = (" prose", " code")
NUM_SHOWN = 6  # of each label, in front of every prompt
LENGTHS = range(60, 400)  # characters of a paragraph


def paragraphs() -> dict[str, list[str]]:
    """Indented paragraphs are code, the others prose; in the order of the reference."""
    found: dict[str, list[str]] = {label: [] for label in LABELS}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            lines = paragraph.splitlines()
            if len(paragraph) in LENGTHS and len({line.startswith("   ") for line in lines}) == 1:
                text = " ".join(line.strip() for line in lines)
                found[LABELS[lines[0].startswith("   ")]].append(text)
    return found


def ask(model: Model, prompts: list[tuple[int, ...]], label_ids: list[int], kv: KVDtypeChoice) -> list[int]:
    """The label of each prompt, by its token id."""
    config = EngineConfig(kv_cache_dtype=kv)
    core = EngineCore(config, TorchRunner(model, config))
    params = SamplingParams(max_tokens=1, temperature=0, logit_bias=dict.fromkeys(label_ids, 100.0))
    root = root_hash(tenant="", model_digest="bench", layout_id=kv)
    for index, prompt in enumerate(prompts):
        core.add(Request(str(index), prompt, params, root))
    said = [0] * len(prompts)
    while core.has_work:
        for request, row in core.step().advanced:
            assert row.token_id in label_ids
            said[int(request.request_id)] = row.token_id or 0
    return said


def f1(said: list[int], right: list[int], positive: int) -> float:
    hits = sum(a == b == positive for a, b in zip(said, right, strict=True))
    return 2 * hits / max(1, said.count(positive) + right.count(positive))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "int8"])
    options = parser.parse_args()
    path = bundled_model_path()
    tokenizer, texts = load_tokenizer(path), paragraphs()
    label_ids = [tokenizer.encode_text(label)[0] for label in LABELS]
    shown = "".join(f"Text: {texts[label][index]}\nKind:{label}\n\n" for index in range(NUM_SHOWN) for label in LABELS)
    items = [
        (text, label_id)
        for label, label_id in zip(LABELS, label_ids, strict=True)
        for text in texts[label][NUM_SHOWN:][:: max(1, 2 * len(texts[label]) // options.items)][: options.items // 2]
    ]
    prompts = [tokenizer.encode_text(f"{shown}Text: {text}\nKind:") for text, _ in items]
    right = [label_id for _, label_id in items]
    model = load_model(path, dtype=options.dtype)
    said, forms = {}, ("fp16", "int8")
    for form in forms:
        started = time.perf_counter()
        said[form] = ask(model, prompts, label_ids, form)
        score = f1(said[form], right, label_ids[1])
        print(f"KV {form}: F1 {score:.4f} on {len(items)} texts, {time.perf_counter() - started:.0f} s", flush=True)
    same = sum(a == b for a, b in zip(said["fp16"], said["int8"], strict=True))
    mean = sum(map(len, prompts)) / len(prompts)
    print(f"same label {same / len(items):.4f}; prompts of {mean:.0f} tokens, {options.dtype}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
