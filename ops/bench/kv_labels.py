"""Whether an int8 KV cache changes what a model says a text is: labels by the engine with fp16 and with int8 KV.

python ops/bench/kv_labels.py --items 256

Short texts are of one of four topics; sixteen labelled ones come first in every prompt, and the answer is the likeliest
of the four label tokens. Prints the agreement of the two runs and the macro F1 of each. About a
minute of CPU time.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

# this file must not hide the packages of the same names: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]

from topic_texts import LABELS, asked, shown  # noqa: E402 (the path is set above)

from engine.cache.block import root_hash  # noqa: E402
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

BLOCK_SIZE = EngineConfig().block_size
NUM_SHOWN = 4  # of each topic, in front of every prompt
LEAST_F1 = 0.75
"""With fp16: a model that cannot do the task says nothing of int8."""
MOST_LOST = 0.003
"""Goal: F1 that int8 may cost."""


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


def macro_f1(said: list[int], right: list[int]) -> float:
    """The mean over the labels."""
    scores = []
    for label in sorted(set(right)):
        hits = sum(a == b == label for a, b in zip(said, right, strict=True))
        scores.append(2 * hits / (said.count(label) + right.count(label)))
    return statistics.fmean(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=256, help="texts of all topics together, 256 at most")
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "int8"])
    options = parser.parse_args()
    path = bundled_model_path()
    tokenizer = load_tokenizer(path)
    label_ids = [tokenizer.encode_text(f" {label}")[0] for label in LABELS]
    assert len(set(label_ids)) == len(LABELS), "two labels begin with the same token"
    examples: list[tuple[str, str]] = []
    rng = random.Random(1)
    for texts in zip(*(shown(label, NUM_SHOWN) for label in LABELS), strict=True):
        row = list(zip(texts, LABELS, strict=True))  # one of each, so that no label is the latest for long
        rng.shuffle(row)
        examples += row
    before = "".join(f"Text: {text}\nTopic: {label}\n\n" for text, label in examples)
    per_label = options.items // len(LABELS)
    items = [(text, id_) for label, id_ in zip(LABELS, label_ids, strict=True) for text in asked(label)[:per_label]]
    prompts = [tokenizer.encode_text(f"{before}Text: {text}\nTopic:") for text, _ in items]
    right = [label_id for _, label_id in items]
    model = load_model(path, dtype=options.dtype)
    said: dict[str, list[int]] = {}
    scores: dict[str, float] = {}
    for form in ("fp16", "int8"):
        started = time.perf_counter()
        said[form] = ask(model, prompts, label_ids, form)
        scores[form] = macro_f1(said[form], right)
        print(f"KV {form}: F1 {scores[form]:.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    same = sum(a == b for a, b in zip(said["fp16"], said["int8"], strict=True))
    mean = sum(map(len, prompts)) / len(prompts)
    stored = statistics.fmean(len(prompt) // BLOCK_SIZE * BLOCK_SIZE / len(prompt) for prompt in prompts)
    print(
        f"{len(items)} texts of {len(LABELS)} topics, prompts of {mean:.0f} tokens, of which {stored:.0%} lie in full "
        f"blocks, {options.dtype} weights: same label {same / len(items):.4f}, "
        f"F1 {scores['int8'] - scores['fp16']:+.4f} with int8"
    )
    if scores["fp16"] < LEAST_F1:
        raise SystemExit(f"NO VERDICT: the model cannot do this task, F1 {scores['fp16']:.3f} with fp16")
    if scores["fp16"] - scores["int8"] > MOST_LOST:
        raise SystemExit(f"MISSED: int8 costs {scores['fp16'] - scores['int8']:.4f} of F1, goal {MOST_LOST}")
    print("HELD")


if __name__ == "__main__":
    main()
