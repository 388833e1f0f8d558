"""Ours beside transformers on W1..W4, alternating in one run, each in its own process: speed, ratio, peak memory.

python ops/bench/engine.py --workloads W2,W4 --repetitions 3 --out out/bench
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# this file must not hide the package of the same name: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != HERE] + [str(Path(__file__).parents[2]), HERE]


def serve_ours(pipe: Any, dtype: str) -> None:
    from workloads import corpus, make

    from engine.cache.block import root_hash
    from engine.checkpoint.bundled import bundled_model_path
    from engine.config import EngineConfig
    from engine.core import EngineCore
    from engine.models import load_model
    from engine.request import Request
    from engine.runner import TorchRunner
    from engine.sampling_params import SamplingParams
    from engine.text.tokenizer import load_tokenizer

    path = bundled_model_path()
    tokens = corpus(load_tokenizer(path).encode_text)
    config = EngineConfig(num_blocks=2048, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=2048)
    core = EngineCore(config, TorchRunner(load_model(path, dtype=dtype), config))
    root = root_hash(tenant="", model_digest="bench", layout_id="bench")
    while (task := pipe.recv()) is not None:
        prompts = make(task[0], tokens, task[1])
        core.cache.pool.evict_all()
        first: dict[str, float] = {}
        started = time.perf_counter()
        requests = []
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=prompt.num_out, temperature=0, ignore_eos=True)
            requests.append(Request(str(index), prompt.token_ids, params, root, arrival_seconds=index * 1e-6))
            core.add(requests[-1])
        while core.has_work:
            for request, _ in core.step().advanced:
                first.setdefault(request.request_id, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        outputs = [r.output_token_ids for r in requests]
        assert all(len(o) == p.num_out for o, p in zip(outputs, prompts, strict=True)), "an answer has the wrong length"
        pipe.send((outputs, list(first.values()), seconds, peak_mb()))


def serve_transformers(pipe: Any, dtype: str) -> None:
    import torch
    from peers.transformers_peer import TransformersPeer
    from workloads import corpus, make

    from engine.checkpoint.bundled import bundled_model_path
    from engine.text.tokenizer import load_tokenizer

    path = bundled_model_path()
    tokens = corpus(load_tokenizer(path).encode_text)
    peer = TransformersPeer(path, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    while (task := pipe.recv()) is not None:
        pipe.send((*peer.run(make(task[0], tokens, task[1])), peak_mb()))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


ENGINES = {"v4flash": serve_ours, "transformers": serve_transformers}


def measure(workload: str, repetitions: int, dtype: str) -> dict[str, Any]:
    """Each engine in a fresh process per workload, one warm-up, then in turn."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, runs = {}, [], {name: [] for name in ENGINES}
    for name, serve in ENGINES.items():
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, dtype), daemon=True)
        process.start()
        processes.append(process)
    agreements = []
    for repetition in range(-1, repetitions):
        outputs = {}
        for name, pipe in pipes.items():
            pipe.send((workload, repetition))
            result = pipe.recv()
            outputs[name] = result[0]
            if repetition >= 0:
                runs[name].append(result)
        agreements += [same_share(a, b) for a, b in zip(*outputs.values(), strict=True)]
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    report: dict[str, Any] = {"workload": workload, "agreement": statistics.mean(agreements)}
    for name, results in runs.items():
        speeds = [sum(map(len, outputs)) / seconds for outputs, _, seconds, _ in results]
        firsts = sorted(t for _, first, _, _ in results for t in first)
        report[name] = {
            "output_tokens_per_second": statistics.median(speeds),
            "runs": speeds,
            "first_token_seconds": {
                f"p{q}": firsts[min(len(firsts) - 1, len(firsts) * q // 100)] for q in (50, 95, 99)
            },
            "peak_mb": max(peak for *_, peak in results),
        }
    ours, theirs = report["v4flash"]["runs"], report["transformers"]["runs"]
    report["ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return report


def same_share(ours: list[int], theirs: list[int]) -> float:
    """Share of an output before the first difference."""
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    return same / len(ours)


def plot(reports: list[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(reports), figsize=(3 * len(reports), 3.4), layout="constrained")
    for axis, report in zip([axes] if len(reports) == 1 else axes, reports, strict=True):
        axis.bar(list(ENGINES), [report[n]["output_tokens_per_second"] for n in ENGINES], color=["#1f6f8b", "#b8b8b8"])
        axis.set_title(f"{report['workload']}: {report['ratio']:.2f} x")
        axis.set_ylabel("output tokens/s")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="W1,W2,W3,W4")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{platform.machine()}, {os.cpu_count()} cores, {options.dtype}, output tokens/s, median of runs in turn")
    reports = []
    for workload in options.workloads.split(","):
        report = measure(workload, options.repetitions, options.dtype)
        reports.append(report)
        ours, theirs = report["v4flash"], report["transformers"]
        first = [engine["first_token_seconds"]["p50"] for engine in (ours, theirs)]
        print(
            f"{workload}: ours {ours['output_tokens_per_second']:.0f}, "
            f"transformers {theirs['output_tokens_per_second']:.0f}, ratio {report['ratio']:.2f}; "
            f"first token p50 {first[0]:.2f}/{first[1]:.2f} s; peak {ours['peak_mb']:.0f}/{theirs['peak_mb']:.0f} MB; "
            f"same before a difference {report['agreement']:.2f}",
            flush=True,
        )
    (options.out / "engine.json").write_text(json.dumps(reports, indent=1))
    plot(reports, options.out / "engine.png")


if __name__ == "__main__":
    main()
