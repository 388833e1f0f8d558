"""`make fuzz`: new inputs from the corpus, steered by what they reach (atheris), for FUZZ_SECONDS (60).

Inputs that reach something new are kept in FUZZ_KEPT (`.cache/fuzz`); one that breaks a rule ends the run and is
written there as `crash-*`. Whoever mends what it found adds it to `tests/fuzz/corpus`.
"""

import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["topics", "worker"]):
    from target import check

HERE = Path(__file__).parent
KEPT = Path(os.environ.get("FUZZ_KEPT") or HERE.parents[1] / ".cache" / "fuzz")


def main() -> None:
    seconds = os.environ.get("FUZZ_SECONDS", "60")
    KEPT.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", f"-artifact_prefix={KEPT}/"]
    atheris.Setup([sys.argv[0], str(KEPT), str(HERE / "corpus"), *options], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
