"""Ours beside its peers on W1..W4, alternating in one run, each in its own process.

python ops/bench/engine.py --workloads W1,W2,W3,W4,NLL --modes bf16,int8 --repetitions 3 --out out/bench

Gives speed, ratio, share of the machine's limit, peak memory and quality. Runs with the same --out add up: a workload
that is measured again replaces its earlier figures.
"""

import argparse
import json
import platform
import signal
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="W1,W2,W3,W4,NLL", help="NLL is the likelihood of 16,384 tokens")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--modes", default="bf16,int8", help="precisions: bf16, int8, fp32")
    parser.add_argument("--peers", default="transformers,llama.cpp,OpenVINO,vLLM", help="empty: ours alone")
    parser.add_argument("--without-ours", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended too
    compare(parser.parse_args())


def compare(options: argparse.Namespace) -> None:
    # here, because only now the search path is right
    from limits import measure as measure_machine
    from plot import plot
    from report import Results, summary, table
    from roster import ORACLE, OURS, ROSTER, num_threads
    from turns import Turns
    from workloads import corpus, make

    from engine.checkpoint.bundled import bundled_model_path
    from engine.text.tokenizer import load_tokenizer

    options.out.mkdir(parents=True, exist_ok=True)

    names = ([] if options.without_ours else [OURS]) + [name for name in options.peers.split(",") if name]
    missing = {name: ROSTER[name].missing() for name in names if ROSTER[name].missing()}
    for name, files in missing.items():
        print(f"MISSING {name}: {files[0]} is not there; `make peers` sets it up")
    engines = [name for name in names if name not in missing]
    machine = measure_machine(ROSTER[OURS].python, num_threads())
    file = options.out / "engine.json"
    results = Results.load(file) if file.exists() else Results()
    tokens = corpus(load_tokenizer(bundled_model_path()).encode_text)
    turns = Turns(options, tokens)
    workloads, modes = options.workloads.split(","), options.modes.split(",")
    tried = {*names, *(f"{name} {precision}" for name in names for precision in modes)}
    results.missing = {label: why for label, why in results.missing.items() if label not in tried}
    results.missing |= {name: files[0] for name, files in missing.items()}
    results.machine = f"{platform.machine()}, {num_threads()} cores"
    results.command = "python ops/bench/engine.py " + " ".join(sys.argv[1:])
    try:
        for precision in modes:
            able = [name for name in engines if precision in ROSTER[name].precisions]
            measured: dict[str, dict[str, Any]] = {}
            for workload in workloads:
                likelihood = workload == "NLL"
                measured[workload] = (
                    turns.likelihood(precision, able) if likelihood else turns.speed(workload, precision, able)
                )
                machine = machine.at_best(measure_machine(ROSTER[OURS].python, num_threads()))
            turns.stop_kept()
            for workload, entries in measured.items():
                # only now, because the judge would take memory and cores from those that are measured
                if workload != "NLL" and entries and not ORACLE.missing():
                    turns.judge(workload, entries)
                prompts = [make(workload, tokens, i) for i in range(options.repetitions)] if workload != "NLL" else []
                results.add(workload, precision, summary(workload, precision, entries, prompts, machine))
                results.missing |= turns.failed
                file.write_text(json.dumps(results.as_dict(), indent=1))
    finally:
        turns.abort()
    text = table(results)
    (options.out / "engine.md").write_text(text)
    print(text)
    plot(results, options.out / "engine.png")


if __name__ == "__main__":
    # this file must not hide the package of the same name: its folder goes to the end of the search path
    here = str(Path(__file__).parent)
    sys.path = [entry for entry in sys.path if entry != here] + [str(Path(__file__).parents[2]), here]
    main()
