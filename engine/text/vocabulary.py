"""Where a tokenizer comes from: an HF directory or a GGUF file, as one plain description."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf_file import open_gguf
from engine.errors import ModelLoadError

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
# Ends of a turn that GGUF files of chat models name as tokens, not always as their end-of-text id.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`spec` is the content of a tokenizer.json; `special_tokens` are the names a chat template may use."""

    spec: dict[str, Any]
    eos_token_ids: frozenset[int]
    special_tokens: dict[str, str]
    chat_template: str | None


def read_vocabulary(path: Path) -> Vocabulary:
    """Raises ModelLoadError naming what is missing or not supported."""
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_directory(path: Path) -> Vocabulary:
    if not (path / "tokenizer.json").is_file():
        raise ModelLoadError(f"there is no tokenizer.json in {path}")
    spec, config = _json(path / "tokenizer.json"), _json(path / "tokenizer_config.json")
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special[name] = token
    ids = {added["content"]: added["id"] for added in spec.get("added_tokens") or []}
    eos: set[int] = {ids[special["eos_token"]]} if special.get("eos_token") in ids else set()
    for file in ("generation_config.json", "config.json"):
        named = _json(path / file).get("eos_token_id")
        eos.update(named if isinstance(named, list) else [] if named is None else [named])
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    return Vocabulary(spec, frozenset(eos), special, template)


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return content


def _from_gguf(path: Path) -> Vocabulary:
    _, fields = open_gguf(path)
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ModelLoadError(f"tokenizer model {fields.get('tokenizer.ggml.model')!r} is not supported: only 'gpt2'")
    tokens, types, merges = (_list(fields, name) for name in ("tokens", "token_type", "merges"))
    if len(tokens) != len(types):
        raise ModelLoadError(f"{len(tokens)} tokens but {len(types)} token types")
    added = [
        {"id": index, "content": token, "special": kind == _GGUF_CONTROL, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED)
    ]
    special = {
        f"{short}_token": tokens[index]
        for short, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if isinstance(index := fields.get(f"tokenizer.ggml.{name}_token_id"), int) and index < len(tokens)
    }
    named = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    eos = {index for index in named if isinstance(index, int)}
    eos |= {entry["id"] for entry in added if entry["special"] and entry["content"] in _TURN_ENDS}
    bos = special.get("bos_token") if fields.get("tokenizer.ggml.add_bos_token") else None
    spec = _spec(tokens, merges, added, str(fields.get("tokenizer.ggml.pre")), bos)
    return Vocabulary(spec, frozenset(eos), special, fields.get("tokenizer.chat_template"))


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise ModelLoadError(f"the GGUF file has no tokenizer.ggml.{name}")
    return value


def _spec(
    tokens: list[str], merges: list[str], added: list[dict[str, Any]], pre: str, bos: str | None
) -> dict[str, Any]:
    """The tokenizer.json of byte-level BPE with the pre-tokenizer that GGUF calls `pre`."""
    ids = {token: index for index, token in enumerate(tokens)}
    post = None
    if bos is not None:
        post = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
        }
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_pre_tokenizers(pre))},
        "post_processor": post,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": [merge.split(" ") for merge in merges],
            "ignore_merges": pre == "llama-bpe",
            "byte_fallback": False,
            "fuse_unk": False,
        },
    }


def _pre_tokenizers(pre: str) -> Iterable[dict[str, Any]]:
    match pre:
        case "smollm":
            return {"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)
        case "gpt-2" | "default":
            return (_byte_level(use_regex=True),)
        case "qwen2" | "llama-bpe":
            regex = _QWEN2 if pre == "qwen2" else _LLAMA3
            split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            return split, _byte_level(use_regex=False)
    raise ModelLoadError(f"pre-tokenizer {pre!r} is not supported: smollm, gpt-2, qwen2 and llama-bpe are")


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
