"""Blocks of the KV cache as bytes and layer by layer are the same memory, and their size is what the spec says."""

import pytest
import torch

from engine.cache.spec import CacheSpec, KVDtype, layer_dtypes
from engine.checkpoint.bundled import bundled_model_path
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.kv_memory import KVCacheMemory
from engine.loading import load_model_and_core


def spec_of(*dtypes: KVDtype, compute: KVDtype = "bf16") -> CacheSpec:
    return CacheSpec(dtypes, compute, num_kv_heads=3, head_dim=40, block_size=4, group_size=32)


def write_blocks(memory: KVCacheMemory) -> None:
    """Another number in every element."""
    for index, layer in enumerate(memory.layers):
        for tensor in (layer.body, layer.scales):
            if tensor is not None:
                tensor.copy_((torch.arange(tensor.numel()) % 89 + index).view(tensor.shape))


@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("int8", "int8"), ("int8", "bf16", "fp16", "fp32", "int8")])
def test_a_block_moves_in_one_copy(dtypes: tuple[KVDtype, ...]) -> None:
    """All layers of a block, scales included, are its bytes: copied elsewhere they are there, and nothing else is."""
    memory = KVCacheMemory(spec_of(*dtypes), num_blocks=5, num_tails=2)
    write_blocks(memory)
    expected = [(layer.body.clone(), None if layer.scales is None else layer.scales.clone()) for layer in memory.layers]
    source = memory.block_bytes(3)
    assert len(source) == source.nbytes == memory.bytes_per_block
    memory.block_bytes(1)[:] = source
    for layer, (body, scales) in zip(memory.layers, expected, strict=True):
        body[1] = body[3]
        assert torch.equal(layer.body, body)
        if scales is not None and layer.scales is not None:
            scales[1] = scales[3]
            assert torch.equal(layer.scales, scales)


def test_only_layers_in_another_form_have_tails() -> None:
    """And the memory that tails take is counted before blocks are."""
    memory = KVCacheMemory(spec_of("int8", "bf16"), num_blocks=2, num_tails=7)
    int8, bf16 = memory.layers
    assert bf16.tail is None
    assert int8.tail is not None
    assert int8.tail.dtype is int8.compute_dtype is torch.bfloat16
    assert 7 * memory.spec.bytes_per_tail == int8.tail.nbytes
    block = memory.spec.bytes_per_block
    assert memory.spec.num_blocks_in(3 * block + int8.tail.nbytes, num_tails=7) == 3
    with pytest.raises(ValueError, match="hold no block"):
        memory.spec.num_blocks_in(3 * block, num_tails=700)


def test_an_int8_block_is_half_of_a_bf16_one_and_its_scales() -> None:
    """For the sizes of SmolLM2: 190,080 bytes instead of 368,640."""
    sizes = {
        dtype: CacheSpec((dtype,) * 30, "bf16", num_kv_heads=3, head_dim=64, block_size=16).bytes_per_block
        for dtype in ("int8", "bf16")
    }
    assert sizes == {"int8": 190_080, "bf16": 368_640}


def test_the_models_list_names_layers_and_the_setting_the_others() -> None:
    """A list in the model's config wins where it names a layer; one name there is a default."""
    assert layer_dtypes("auto", None, "fp32", 2) == ("fp32", "fp32")
    assert layer_dtypes("auto", "int8", "bf16", 2) == ("int8", "int8")
    assert layer_dtypes("fp16", "int8", "bf16", 2) == ("fp16", "fp16")
    assert layer_dtypes("int8", ["bf16", None, "auto"], "fp32", 3) == ("bf16", "int8", "fp32")
    with pytest.raises(ValueError, match="names 1 layers, the model has 2"):
        layer_dtypes("auto", ["int8"], "bf16", 2)
    with pytest.raises(ValueError, match="int4"):
        layer_dtypes("auto", ["int8", "int4"], "bf16", 2)


def test_every_field_of_the_layout_changes_its_id() -> None:
    """Blocks of another layout are never taken for one's own."""
    base = {"compute_dtype": "bf16", "num_kv_heads": 3, "head_dim": 64, "block_size": 16, "group_size": 64}
    changes = {"compute_dtype": "fp32", "num_kv_heads": 2, "head_dim": 32, "block_size": 8, "group_size": 32}
    changes |= {"rank": 1, "world_size": 2}
    ids = {CacheSpec(("int8",), **base | {name: value}).layout_id for name, value in changes.items()}  # type: ignore[arg-type]
    ids |= {CacheSpec(dtypes, **base).layout_id for dtypes in (("int8",), ("bf16",), ("int8", "int8"))}  # type: ignore[arg-type]
    assert len(ids) == len(changes) + 3


@pytest.mark.model
def test_memory_decides_how_many_blocks_a_loaded_model_has() -> None:
    """The tails of all running sequences are taken off first; memory without room for a block is a clear error."""

    def load(memory_bytes: int) -> int:
        config = EngineConfig(kv_cache_memory_bytes=memory_bytes, kv_cache_dtype="int8", max_num_seqs=4)
        loaded = load_model_and_core(
            bundled_model_path(), config, name=None, dtype="bf16", exact_modules=(), few_rows=False, check=False
        )
        assert "kv=int8" in loaded.layout_id
        return len(loaded.core.cache.pool.blocks)

    assert load(100 * 190_080 + 4 * 345_600 + 190_079) == 100
    with pytest.raises(ModelLoadError, match="hold no block"):
        load(4 * 345_600)
