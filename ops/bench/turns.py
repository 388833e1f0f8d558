"""Engines taking turns at the same prompts: started, warmed up, run, stopped, and their answers judged."""

import argparse
from typing import Any

from link import EngineFailedError, EngineProcess
from peers.api import Prompt
from quality import agreement
from roster import ROSTER
from workloads import make, warm_up, windows


class Turns:
    """Engines of one precision at a time are resident; those that load for minutes stay for all workloads."""

    def __init__(self, options: argparse.Namespace, tokens: list[int]) -> None:
        self._options, self._tokens = options, tokens
        self._kept: dict[tuple[str, str], EngineProcess] = {}
        self._started: list[EngineProcess] = []
        self.failed: dict[str, str] = {}

    def start(self, engine: str, precision: str, workload: str) -> EngineProcess | None:
        """The engine ready for a workload; None, with the reason said once, where it cannot run."""
        if kept := self._kept.get((engine, precision)):
            kept.reset_peak()
            return kept
        label = f"{engine} {precision}"
        if label in self.failed:
            return None
        try:
            process = EngineProcess(engine, precision, workload, self._options.out / f"{engine}-{precision}.log")
        except EngineFailedError as error:
            self.fail(label, error)
            return None
        self._started.append(process)
        if ROSTER[engine].kept:
            self._kept[engine, precision] = process
        return process

    def fail(self, label: str, error: EngineFailedError) -> None:
        self.failed[label] = str(error)
        print(f"MISSING {error}", flush=True)

    def stop(self, process: EngineProcess) -> None:
        if process not in self._kept.values():
            process.close()

    def stop_kept(self) -> None:
        for process in self._kept.values():
            process.close()
        self._kept.clear()

    def abort(self) -> None:
        """End whatever still runs, whatever it is doing."""
        for process in self._started:
            process.abort()

    def speed(self, workload: str, precision: str, engines: list[str]) -> dict[str, Any]:
        """Runs of each engine in turn, the order turned by one at each repetition; warmed up on others."""
        repetitions = [make(workload, self._tokens, index) for index in range(self._options.repetitions)]
        running = {name: process for name in engines if (process := self.start(name, precision, workload))}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
        for name in list(running):
            self._run(running, runs, name, warm_up(make(workload, self._tokens, -1)))
        runs = {name: [] for name in running}
        for index, prompts in enumerate(repetitions):
            order = [*running]
            for name in order[index % len(order) :] + order[: index % len(order)]:
                self._run(running, runs, name, prompts)
        results = {}
        for name, process in running.items():
            peak = process.peak_mb()
            results[name] = {
                "name": process.name,
                "settings": process.settings,
                "runs": runs[name],
                "peak_mb": peak,
            }
            self.stop(process)
        return results

    def _run(self, running: dict[str, EngineProcess], runs: dict[str, Any], name: str, prompts: list[Prompt]) -> None:
        process = running[name]
        try:
            answer = process.ask({"prompts": [[p.token_ids, p.num_out] for p in prompts]})
            check_lengths(answer["outputs"], prompts)
        except EngineFailedError as error:
            self.fail(f"{name} {process.precision}", error)
            self._kept.pop((name, process.precision), None)
            process.close()
            del running[name], runs[name]
            return
        runs[name].append(answer)

    def likelihood(self, precision: str, engines: list[str]) -> dict[str, Any]:
        results = {}
        for name in engines:
            process = self.start(name, precision, "NLL")
            if process is None:
                continue
            try:
                nll = process.ask({"windows": windows(self._tokens)})["nll"]
                results[name] = {"name": process.name, "nll": nll, "peak_mb": process.peak_mb()}
                self.stop(process)
            except EngineFailedError as error:
                self.fail(f"{name} {precision}", error)
                self._kept.pop((name, precision), None)
        return results

    def judge(self, workload: str, engines: dict[str, dict[str, Any]]) -> None:
        """Replaces the outputs of all engines by their gaps to float32, one prompt after the other."""
        oracle = EngineProcess("oracle", "fp32", workload, self._options.out / "oracle.log")
        self._started.append(oracle)
        entries = list(engines.values())
        for entry in entries:
            entry["gaps"] = []
        for index in range(self._options.repetitions):
            for row, prompt in enumerate(make(workload, self._tokens, index)):
                said = [entry["runs"][index]["outputs"][row] for entry in entries]
                distinct = [list(output) for output in {tuple(output): None for output in said}]
                gaps = oracle.ask({"judge": prompt.token_ids, "outputs": distinct})["gaps"]
                for entry, output in zip(entries, said, strict=True):
                    entry["gaps"].append(gaps[distinct.index(output)])
        oracle.close()
        for entry in entries:
            entry["agreement"] = agreement(entry.pop("gaps"))
            entry["num_judged"] = self._options.repetitions * len(entry["runs"][0].pop("outputs"))
            for run in entry["runs"]:
                run.pop("outputs", None)


def check_lengths(outputs: list[list[int]], prompts: list[Prompt]) -> None:
    """Raises EngineFailedError unless every answer has exactly the tokens that were asked for."""
    lengths = [len(output) for output in outputs]
    if lengths != [prompt.num_out for prompt in prompts]:
        raise EngineFailedError(f"answers of {sorted(set(lengths))} tokens, {prompts[0].num_out} were wanted")
