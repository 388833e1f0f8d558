"""Text to token ids and back. Text of a user never becomes a control token."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.api import ChatMessage
from engine.errors import InvalidRequestError, ModelLoadError
from engine.text.chat_template import ChatTemplate

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A byte-level tokenizer with its control tokens and chat template."""

    def __init__(
        self, inner: tokenizers.Tokenizer, *, eos_token_ids: frozenset[int], template: ChatTemplate | None
    ) -> None:
        self._inner = inner
        self._template = template
        self.eos_token_ids = eos_token_ids
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        self._bytes_of = {char: byte for byte, char in _byte_alphabet().items()}

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of plain text: markup of control tokens in it is spelled out like any other text."""
        return tuple(self._encode(text, special=False))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids of a conversation, the assistant's turn opened. Raises InvalidRequestError without a chat template."""
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        ids: list[int] = []
        for text, from_user in self._template.render(messages):
            ids += self._encode(text, special=not from_user)
        return tuple(ids)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        self._inner.encode_special_tokens = not special
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, control tokens left out, broken code points as U+FFFD."""
        return b"".join(self.token_bytes(i) for i in token_ids if i not in self._special).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; b"" for an id that is not in the vocabulary."""
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if any(char not in self._bytes_of for char in token):
            return str(token).encode()
        return bytes(self._bytes_of[char] for char in token)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte (byte-level BPE)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {byte: chr(256 + index) for index, byte in enumerate(others)}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a GGUF file or a Hugging Face directory; raises ModelLoadError naming what is missing."""
    path = Path(path)
    try:
        return _from_gguf(path) if path.suffix == ".gguf" else _from_directory(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"the tokenizer of {path} cannot be read: {error}") from error


def _from_directory(path: Path) -> Tokenizer:
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    config: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = path / name
        config |= json.loads(file.read_text()) if file.exists() else {}
    template = path / "chat_template.jinja"
    source = template.read_text() if template.exists() else config.get("chat_template")
    names = {key: _token_text(config.get(key)) for key in ("bos_token", "eos_token")}
    eos = config.get("eos_token_id")
    ids = {int(i) for i in (eos if isinstance(eos, list) else [] if eos is None else [eos])}
    named = inner.token_to_id(names["eos_token"]) if names["eos_token"] else None
    return Tokenizer(
        inner,
        eos_token_ids=frozenset(ids | ({named} if named is not None else set())),
        template=ChatTemplate(source, names) if source else None,
    )


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _from_gguf(path: Path) -> Tokenizer:
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ValueError(f"tokenizer kind {fields.get('tokenizer.ggml.model')!r} is not supported, only gpt2 (BPE)")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = _pre_tokenizer(fields.get("tokenizer.ggml.pre", "default"))
    inner.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    eos = fields["tokenizer.ggml.eos_token_id"]
    bos = fields.get("tokenizer.ggml.bos_token_id", eos)
    source = fields.get("tokenizer.chat_template")
    template = ChatTemplate(source, {"bos_token": tokens[bos], "eos_token": tokens[eos]}) if source else None
    return Tokenizer(inner, eos_token_ids=frozenset({eos}), template=template)


def _pre_tokenizer(kind: str) -> Any:
    if kind in ("smollm", "smollm2"):
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if kind == "qwen2":
        split = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_PATTERN), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if kind in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    raise ValueError(f"pre-tokenizer {kind!r} is not supported")
