"""Seconds from the start of a process to the first token of the engine in it: compiled operations cold, warm, and off.

python ops/bench/startup.py --repetitions 3 --out out/bench

cold: V4FLASH_KERNEL_CACHE is an empty folder, so the operations are compiled first; warm: the same folder, now filled;
off: V4FLASH_ISA=none. The model's file and Python's are in the page cache in all of them (a first start, not counted,
has read them). Beside a time stands the CPU time of the process and its compilers, which neighbours move less: about
8 s for a warm start, two minutes and more for a cold one, so eight starts are some 5 minutes on two cores of their own
(expected, not timed), and each is given up after half an hour.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# this file must not hide the package of the same name: its folder goes to the end of the search path
HERE = str(Path(__file__).parent)
ROOT = Path(__file__).parents[2]
sys.path = [entry for entry in sys.path if entry != HERE] + [str(ROOT), HERE]

STAGES = ("imported", "loaded", "first token")
KINDS = ("cold", "warm", "off")
PROMPT = "Once upon a time there was a small engine that"
LIMIT_SECONDS = 1800


async def first_token(dtype: Any) -> dict[str, Any]:
    """In the process that is measured: Unix time at the end of each stage."""
    from engine.api import GenerateRequest
    from engine.checkpoint.bundled import bundled_model_path
    from engine.config import EngineConfig
    from engine.model_engine import load_engine
    from engine.sampling_params import SamplingParams

    moments = [time.time()]
    engine = load_engine(bundled_model_path(), EngineConfig(), dtype=dtype)
    await engine.start()
    moments.append(time.time())
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    request = GenerateRequest("first", engine.encode_text(PROMPT), params, operation="/v1/completions")
    tokens = [token async for delta in engine.generate(request) for token in delta.token_ids]
    moments.append(time.time())
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    kernels = engine.model.kernels
    await engine.close()
    return {"moments": moments, "cpu": cpu, "token": tokens[0], "kernels": kernels}


def start(kind: str, folder: Path, dtype: str) -> dict[str, Any]:
    """Seconds of each stage from the start of a process of its own."""
    environment = os.environ | {"V4FLASH_KERNEL_CACHE": str(folder), "OMP_WAIT_POLICY": "passive"}
    environment.pop("V4FLASH_ISA", None)
    if kind == "off":
        environment["V4FLASH_ISA"] = "none"
    command = [sys.executable, __file__, "--child", "--dtype", dtype]
    began = time.time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    if kind != "off" and not said["kernels"].startswith("cpu-native"):
        raise SystemExit(f"no compiled operations, so nothing to compare: {said['kernels']}")
    seconds = dict(zip(STAGES, (moment - began for moment in said["moments"]), strict=True))
    return seconds | {"cpu": said["cpu"], "token": said["token"], "kernels": said["kernels"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "int8"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cold-repetitions", type=int, default=1, help="of the starts that compile")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(asyncio.run(first_token(options.dtype))))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as parent:
        start("off", Path(parent), options.dtype)
        for repetition in range(options.repetitions):
            cold = Path(parent) / f"{min(repetition, options.cold_repetitions - 1)}"
            for kind in KINDS:
                if kind == "cold" and repetition >= options.cold_repetitions:
                    continue
                runs[kind].append(start(kind, cold, options.dtype))
                print(f"  {kind}: {runs[kind][-1]}", file=sys.stderr, flush=True)
    if len({run["token"] for part in runs.values() for run in part}) != 1:
        raise SystemExit("the first tokens differ: no figures")
    busy = f"load average {os.getloadavg()[2]:.1f}"
    machine = f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, {busy}, {options.dtype}"
    print(f"{machine}; medians, seconds from the start of the process")
    print(f"| operations | starts | {' | '.join(STAGES)} | slowest | CPU time |\n|---|---|---|---|---|---|---|")
    for kind, part in runs.items():
        stages = " | ".join(f"{statistics.median(run[stage] for run in part):.1f}" for stage in STAGES)
        slowest = max(run[STAGES[-1]] for run in part)
        cpu = statistics.median(run["cpu"] for run in part)
        print(f"| {kind} | {len(part)} | {stages} | {slowest:.1f} | {cpu:.1f} |")
    report = {"machine": machine, "command": sys.argv, "runs": runs}
    (options.out / "startup.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
