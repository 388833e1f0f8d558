"""llama.cpp's server, spoken to over HTTP with every answer streamed, and its library for the likelihood."""

import asyncio
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy
from api import Clock, Prompt, Setup

FILES = {"bf16": "bf16.gguf", "int8": "q8_0.gguf"}
# slots, and tokens that a slot must hold; a shared prefix is found in a slot's own past, so few slots suit W4
SLOTS = {"W1": (1, 320), "W2": (64, 320), "W3": (16, 1664), "W4": (8, 640)}
TOKENS = re.compile(rb'"tokens":\[([0-9,]*)\]')
START_SECONDS = 60


class LlamaCppPeer:
    def __init__(self, setup: Setup) -> None:
        self._setup, self._root = setup, setup.peers / "llamacpp"
        self._model = setup.weights / FILES[setup.precision]
        version = (self._root / "VERSION").read_text().strip()
        self.name = f"llama.cpp of llama-cpp-python {version}"
        slots, length = SLOTS.get(setup.workload, (1, 2048))
        flags = {"-fa": "on", "-np": str(slots), "-c": str(slots * length)}
        self.settings = flags | {"-t": str(setup.threads), "file": self._model.name, "--no-kv-unified": ""}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [str(self._root / "build/bin/llama-server"), "-m", str(self._model), "--port", str(self._port)]
        command += ["-t", str(setup.threads), "--no-kv-unified", "--no-ui", "--log-verbosity", "1"]
        command += [part for flag in flags.items() for part in flag]
        self._server = subprocess.Popen(command)
        if not self._healthy():
            # with AMX, 0.3.36 dies of an illegal instruction on some machines; without repacking AMX is not used
            self.settings["--no-repack"] = ""
            self._server = subprocess.Popen([*command, "--no-repack"])
            if not self._healthy():
                raise RuntimeError("llama-server did not become healthy")

    def _healthy(self) -> bool:
        """Whether the server answers before it dies or the time is up; one that does not is ended."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                    return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.close()
        return False

    def generate(self, prompts: list[Prompt]) -> Clock:
        clock = Clock(len(prompts))
        asyncio.run(self._all(prompts, clock))
        return clock

    async def _all(self, prompts: list[Prompt], clock: Clock) -> None:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                group.create_task(self._one(index, prompt, clock, started))

    async def _one(self, index: int, prompt: Prompt, clock: Clock, started: float) -> None:
        body: dict[str, Any] = {"prompt": list(prompt.token_ids), "n_predict": prompt.num_out, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0, "cache_prompt": True, "return_tokens": True}
        payload = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"llama-server: {status!r} {(await reader.read())[-300:]!r}")
        while line := await reader.readline():
            if line.startswith(b"data:") and b'"stop":true' not in line:
                found = TOKENS.search(line)
                tokens = [int(part) for part in found[1].split(b",") if part] if found else []
                clock.arrived(index, tokens, time.perf_counter() - started)
        writer.close()

    def negative_log_likelihood(self, windows: list[list[int]]) -> float:
        """Through the library that the server is linked to, all logits of a window wanted."""
        library = _library(self._root)
        parameters = library.llama_model_default_params()
        parameters.use_extra_bufts = "--no-repack" not in self.settings
        model = library.llama_model_load_from_file(str(self._model).encode(), parameters)
        settings = library.llama_context_default_params()
        longest = max(map(len, windows))
        settings.n_ctx = settings.n_batch = longest
        settings.n_threads = settings.n_threads_batch = self._setup.threads
        settings.flash_attn_type = 1
        context = library.llama_init_from_model(model, settings)
        vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        batch = library.llama_batch_init(longest, 0, 1)
        total, count = 0.0, 0
        for window in windows:
            library.llama_memory_clear(library.llama_get_memory(context), True)
            batch.n_tokens = len(window) - 1
            for position, token in enumerate(window[:-1]):
                batch.token[position], batch.pos[position], batch.logits[position] = token, position, 1
                batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
            if library.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for position, target in enumerate(window[1:]):
                row = library.llama_get_logits_ith(context, position)
                logits = numpy.ctypeslib.as_array(row, (vocabulary,)).astype(numpy.float64)
                top = logits.max()
                total += float(numpy.log(numpy.exp(logits - top).sum()) + top - logits[target])
                count += 1
        return total / count

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


def _library(root: Path) -> Any:
    """llama-cpp-python's bindings, of its own sources, over the very library that was built."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(root.resolve() / "build" / "bin")
    sys.path.insert(0, str(root / "source"))
    return importlib.import_module("llama_cpp.llama_cpp")
