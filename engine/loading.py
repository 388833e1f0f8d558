"""From a path to a model that can step: weights, tokenizer, runner, core."""

import hashlib
from dataclasses import replace
from pathlib import Path

from engine.api import ModelInfo
from engine.cache.opening import open_transfers
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.loaded_model import LoadedModel
from engine.models import load_model
from engine.models.weight_mode import ModeName, WeightMode
from engine.runner import TorchRunner
from engine.text.tokenizer import load_tokenizer
from engine.thermal import find_governor
from kernels.select import select_kernels

DIGEST_PLACES = 1024


def load_model_and_core(
    path: Path,
    config: EngineConfig,
    *,
    name: str | None,
    dtype: ModeName,
    exact_modules: tuple[str, ...],
    few_rows: bool,
    check: bool,
) -> LoadedModel:
    """Load everything; raises ModelLoadError. The context is the smaller of the model's and the configured one."""
    if not path.exists():
        raise ModelLoadError(f"there is no model at {path}")
    tokenizer = load_tokenizer(path)
    kernels = select_kernels("cpu", few_rows=few_rows)
    model = load_model(path, dtype=dtype, exact_modules=exact_modules, kernels=kernels)
    layout = model.cache_spec(config.block_size, config.kv_cache_dtype, config.kv_cache_group_size)
    sized = replace(config, max_model_len=min(config.max_model_len, model.spec.max_model_len))
    if config.kv_cache_memory_bytes is not None:
        try:
            num_blocks = layout.num_blocks_in(config.kv_cache_memory_bytes, config.num_tail_slots)
        except ValueError as error:
            raise ModelLoadError(str(error)) from error
        sized = replace(sized, num_blocks=num_blocks)
    runner = TorchRunner(model, sized)
    transfers = None if sized.cold is None else open_transfers(sized.cold, runner.cache)
    try:
        governor = None if sized.thermal is None else find_governor("cpu", sized.thermal)
        core = EngineCore(sized, runner, transfers=transfers, governor=governor, check=check)
        core.warm_up()
    except BaseException:  # the directories of the SSD tier do not stay locked
        if transfers is not None:
            transfers.close()
        raise
    computes = f"{kernels.name}: {kernels.note}" if kernels.note else kernels.name
    info = ModelInfo(name or path.stem, sized.max_model_len, model.spec.vocab_size, computes)
    digest = f"{checkpoint_digest(path)}/{WeightMode(dtype, exact_modules).digest}"
    return LoadedModel(info, tokenizer, core, digest, layout.layout_id)


def checkpoint_digest(path: Path) -> str:
    """Identity of a checkpoint: SHA-256 over its configuration (RoPE scaling is in there) and, of each weight file, its
    name, size, first mebibyte and 4 KiB in each of 1,024 places: cached KV outlives a process, and a fine-tuned model
    differs from its base in no name and no size."""
    digest = hashlib.sha256()
    if path.is_dir():
        for config in sorted(path.glob("*config.json")):
            digest.update(f"{config.name}:{config.stat().st_size}".encode())
            digest.update(config.read_bytes())
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            for place in range(DIGEST_PLACES):
                stream.seek(size * place // DIGEST_PLACES)
                digest.update(stream.read(4096))
    return digest.hexdigest()
