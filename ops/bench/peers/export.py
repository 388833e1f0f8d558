"""Writes the bundled model's dequantised weights in the form each peer reads, so that all engines run the same numbers.

python ops/bench/peers/export.py .cache/peers/weights

hf/        float32 safetensors, the source of OpenVINO's and vLLM's bf16
hf-w8a8/   compressed-tensors: int8 linears with one scale per output channel, rows quantised at run time, float head
bf16.gguf, q8_0.gguf   for llama.cpp; one-dimensional tensors stay float32, as its own quantiser leaves them
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.bundled import bundled_model_path
from engine.checkpoint.gguf import read_gguf
from engine.text.vocabulary import read_vocabulary

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] as int8, and one float32 scale per row [out, 1]; a row of zeros has scale 1."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def write_directory(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], source: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = read_vocabulary(source)
    theta = config["rope_theta"]
    settings = config | {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.special_tokens}
    for name, content in (
        ("config.json", settings),
        ("tokenizer.json", vocabulary.spec),
        ("tokenizer_config.json", tokenizer),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def w8a8_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            result[name], result[f"{name}_scale"] = quantised(tensor)
        else:
            result[name] = tensor
    return result


def write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType, file_type: gguf.LlamaFileType) -> None:
    """The same file with every matrix dequantised and stored as `kind`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = numpy.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    folder, source = Path(sys.argv[1]), bundled_model_path()
    config, tensors = read_gguf(source)
    write_directory(folder / "hf", config, tensors, source)
    write_directory(folder / "hf-w8a8", config | {"quantization_config": W8A8}, w8a8_tensors(tensors), source)
    kinds, files = gguf.GGMLQuantizationType, gguf.LlamaFileType
    write_gguf(source, folder / "bf16.gguf", kinds.BF16, files.MOSTLY_BF16)
    write_gguf(source, folder / "q8_0.gguf", kinds.Q8_0, files.MOSTLY_Q8_0)
    print(f"{sum(t.numel() for t in tensors.values()):,} parameters written to {folder}")


if __name__ == "__main__":
    main()
