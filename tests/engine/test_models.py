"""Logits are those of transformers, and do not depend on chunks, batch mates or what unused cache memory holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.bundled import bundled_model_path
from engine.checkpoint.gguf import read_gguf
from engine.checkpoint.safetensors import read_safetensors
from engine.errors import ModelLoadError
from engine.inputs import ModelInputs
from engine.kv_memory import KVCacheMemory
from engine.models import MODELS, load_model
from engine.models.layers import Model
from engine.models.rotation import CheckpointRotation
from engine.text.tokenizer import load_tokenizer
from kernels.cpu.int8 import can_multiply_int8
from kernels.select import KERNELS

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def save_oracle(name: str, path: Path, **changes: Any) -> Any:
    """A tiny random model of transformers, saved as a checkpoint and returned."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**SIZES, head_dim=8, **changes)
    model = getattr(transformers, name)(config).eval().float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    return model


def inputs_of(chunks: list[tuple[list[int], int, list[int]]], block_size: int = 4) -> ModelInputs:
    """(all tokens, start, block table) per sequence; logits of every new token."""
    ids, positions, starts, lens = [], [], [0], []
    width = max(len(table) for _, _, table in chunks)
    for tokens, start, _ in chunks:
        ids += tokens[start:]
        positions += range(start, len(tokens))
        starts.append(len(ids))
        lens.append(len(tokens))
    return ModelInputs(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        query_starts=starts,
        kv_lens=lens,
        block_tables=torch.tensor([table + [0] * (width - len(table)) for _, _, table in chunks]),
        tail_slots=list(range(len(chunks))),
        logit_rows=torch.arange(len(ids)),
        block_size=block_size,
    )


def memory_of(model: Model, num_blocks: int = 12, block_size: int = 4, **layout: Any) -> KVCacheMemory:
    """A cache whose every number is NaN."""
    memory = KVCacheMemory(model.cache_spec(block_size, **layout), num_blocks, num_tails=4)
    for layer in memory.layers:
        for tensor in (layer.body, layer.scales, layer.tail):
            if tensor is not None and tensor.is_floating_point():
                tensor.fill_(float("nan"))
    return memory


needs_int8 = pytest.mark.skipif(not can_multiply_int8(), reason="this CPU has neither VNNI nor AMX: no int8 here")
TOKENS = [(7 * i * i + 3) % 131 for i in range(23)]
TABLE = [9, 2, 5, 7, 1, 11]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
@torch.inference_mode()
def test_logits_equal_those_of_transformers(name: str, tied: bool, tmp_path: Path) -> None:
    """At most 1e-4 apart in float32, for every architecture in the table, tied and untied."""
    oracle = save_oracle(name, tmp_path, tie_word_embeddings=tied)
    model = load_model(tmp_path, dtype="fp32")
    cache = memory_of(model)
    ours = model.forward(inputs_of([(TOKENS, 0, TABLE)]), cache)
    theirs = oracle(torch.tensor([TOKENS])).logits[0]
    assert (ours - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("kernels", list(KERNELS))
@torch.inference_mode()
def test_chunks_and_batch_mates_do_not_change_logits(kernels: str, tmp_path: Path) -> None:
    """One pass, or chunks of odd sizes beside another sequence, in memory poisoned by NaN: the same logits."""
    save_oracle("LlamaForCausalLM", tmp_path)
    model = load_model(tmp_path, dtype="fp32", kernels=KERNELS[kernels]())
    whole = model.forward(inputs_of([(TOKENS, 0, TABLE)]), memory_of(model))
    cache = memory_of(model)
    other, rows, start = TOKENS[::-1][:9], [], 0
    for end in (1, 8, 9, 10, 22, 23):
        mate = other[: min(end, 9)]
        logits = model.forward(inputs_of([(mate, 0, [0, 3, 4]), (TOKENS[:end], start, TABLE)]), cache)
        rows.append(logits[len(mate) :])
        start = end
    assert (torch.cat(rows) - whole).abs().max() <= 2e-5


def test_a_bad_checkpoint_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    """Missing, misshapen and truncated weights, and unknown architectures, each say what is wrong."""
    save_oracle("LlamaForCausalLM", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, name = load_file(file), "model.layers.1.mlp.down_proj.weight"
    kept = tensors.pop(name).clone()
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        load_model(tmp_path, dtype="fp32")
    save_file(tensors | {name: kept[:, 1:].contiguous()}, file)
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \[48, 79\]"):
        load_model(tmp_path, dtype="fp32")
    file.write_bytes(file.read_bytes()[:5_000])
    with pytest.raises(ModelLoadError, match=r"damaged or truncated at tensor \w"):
        load_model(tmp_path, dtype="fp32")
    save_file(tensors, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ModelLoadError, match="OtherForCausalLM"):
        load_model(tmp_path, dtype="fp32")


@pytest.mark.model
@torch.inference_mode()
def test_the_real_model_gives_the_logits_of_transformers() -> None:
    """SmolLM2 from its GGUF file against transformers on the same dequantised weights: at most 1e-3 apart."""
    import transformers

    path = bundled_model_path()
    config, tensors = read_gguf(path)
    settings = {key: value for key, value in config.items() if key != "architectures"}
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval().float()
    missing = oracle.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    oracle.tie_weights()
    tokens = [(977 * i * i + 11) % config["vocab_size"] for i in range(64)]
    model = load_model(path, dtype="fp32")
    ours = model.forward(inputs_of([(tokens, 0, [3, 1, 2, 0])], 16), memory_of(model, 4, 16))
    assert (ours - oracle(torch.tensor([tokens])).logits[0]).abs().max() <= 1e-3


@pytest.mark.model
def test_a_truncated_gguf_file_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    """The first tensor that the file no longer holds is named, also by the tokenizer, which is loaded first."""
    cut_gguf = tmp_path / "cut.gguf"
    with bundled_model_path().open("rb") as whole:
        cut_gguf.write_bytes(whole.read(20_000_000))
    with pytest.raises(ModelLoadError, match=r"truncated at tensor token_embd\.weight"):
        load_model(cut_gguf, dtype="fp32")
    with pytest.raises(ModelLoadError, match=r"truncated at tensor token_embd\.weight"):
        load_tokenizer(cut_gguf)


@torch.inference_mode()
def test_a_step_that_wants_no_logits_gives_none(tmp_path: Path) -> None:
    """A prefill chunk that does not end its prompt has no rows to sample."""
    save_oracle("LlamaForCausalLM", tmp_path)
    for dtype in ("fp32", "bf16"):
        model = load_model(tmp_path, dtype=dtype)
        inputs = inputs_of([(TOKENS, 0, TABLE)])
        inputs.logit_rows = torch.tensor([], dtype=torch.int64)
        assert model.forward(inputs, memory_of(model)).shape == (0, 131)


@pytest.mark.parametrize("setting", ["mlp_bias", "attention_bias"])
def test_a_bias_that_would_be_left_out_is_refused_by_name(setting: str, tmp_path: Path) -> None:
    """A checkpoint with biases that the forward pass does not apply does not load."""
    save_oracle("LlamaForCausalLM", tmp_path, **{setting: True})
    with pytest.raises(ModelLoadError, match=setting):
        load_model(tmp_path, dtype="fp32")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
@torch.inference_mode()
def test_a_rotated_checkpoint_is_the_same_function(name: str, tied: bool, tmp_path: Path) -> None:
    """In float32, where nothing rounds: logits of the rotated weights are those of the given ones."""
    save_oracle(name, tmp_path, tie_word_embeddings=tied)
    plain = load_model(tmp_path, dtype="fp32")
    config, tensors = read_safetensors(tmp_path)
    rotation = CheckpointRotation(tensors, SIZES["hidden_size"], 8, seed=1)
    rotated = {key: rotation.apply(key, tensor).contiguous() for key, tensor in tensors.items()}
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    rotated["lm_head.weight"] = rotation.apply("lm_head.weight", head).contiguous()
    assert (rotated["model.embed_tokens.weight"] - tensors["model.embed_tokens.weight"]).abs().max() > 0.1
    save_file(rotated, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    turned = load_model(tmp_path, dtype="fp32")
    inputs = inputs_of([(TOKENS, 0, TABLE)])
    ours, given = (model.forward(inputs, memory_of(model)) for model in (turned, plain))
    assert (ours - given).abs().max() <= 1e-4


@needs_int8
@pytest.mark.model
@torch.inference_mode()
def test_int8_hardly_changes_the_real_model() -> None:
    """Mean negative log likelihood of real text within 0.03 nats of float32, where plain W8A8 loses more (0.048)."""
    path = bundled_model_path()
    tokens = load_tokenizer(path).encode_text(Path("LICENSE").read_text())[:513]
    given, wanted = tokens[:-1], torch.tensor(tokens[1:])
    table, losses = list(range(32)), {}
    for dtype in ("fp32", "int8"):
        model = load_model(path, dtype=dtype)
        logits = model.forward(inputs_of([(given, 0, table)], 16), memory_of(model, 32, 16))
        losses[dtype] = float(torch.nn.functional.cross_entropy(logits, wanted))
    assert abs(losses["int8"] - losses["fp32"]) < 0.03


@needs_int8
def test_modules_that_stay_exact_are_checked_by_name(tmp_path: Path) -> None:
    """A module that the model lacks is an error that names it, and so is a mode that does not exist."""
    save_oracle("LlamaForCausalLM", tmp_path)
    load_model(tmp_path, dtype="int8", exact_modules=("lm_head", "model.layers.1", "qkv_proj"))
    with pytest.raises(ModelLoadError, match=r"no module model\.layers\.9"):
        load_model(tmp_path, dtype="int8", exact_modules=("model.layers.9",))
    with pytest.raises(ModelLoadError, match="one of fp32, bf16, int8, got int3"):
        load_model(tmp_path, dtype="int3")
