"""Text to tokens and back. Text of a user is encoded by a twin that has no control tokens, so it can never make one."""

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.api import ChatMessage
from engine.errors import InvalidRequestError, ModelLoadError
from engine.text.chat_template import ChatTemplate
from engine.text.vocabulary import Vocabulary, read_vocabulary


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer of an HF directory (tokenizer.json) or of a GGUF file; raises ModelLoadError."""
    return Tokenizer(read_vocabulary(Path(path)))


class Tokenizer:
    """A byte-level BPE tokenizer; safe to use from several threads, as nothing changes after loading."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        spec = vocabulary.spec
        if not _is_byte_level(spec):
            raise ModelLoadError("the tokenizer is not byte-level BPE, which is the only supported kind")
        try:
            self._full = tokenizers.Tokenizer.from_str(json.dumps(spec))
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(_without_added_tokens(spec)))
        except Exception as error:  # the library raises Exception itself
            raise ModelLoadError(f"the tokenizer cannot be built: {error}") from error
        self.eos_token_ids = vocabulary.eos_token_ids
        added = {int(entry["id"]): entry for entry in spec.get("added_tokens") or []}
        self._special = frozenset(index for index, entry in added.items() if entry.get("special"))
        ids: dict[str, int] = self._full.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self._bytes = [b""] * self.vocab_size
        for token, index in ids.items():
            self._bytes[index] = token.encode() if index in added else _to_bytes(token)
        self._prefix = tuple(index for index in self._full.encode("").ids if index not in self.eos_token_ids)
        source = vocabulary.chat_template
        self._template = None if source is None else ChatTemplate(source, vocabulary.special_tokens)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Tokens of plain text, after the model's begin-of-text token if it wants one. No other added token of the
        vocabulary is ever among them. What UTF-8 cannot say (lone surrogates) becomes "?"."""
        return (*self._prefix, *self._encode_plain(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Tokens of a conversation with the assistant's turn opened; control tokens come from the template alone.
        Raises InvalidRequestError for a conversation that the template refuses."""
        if self._template is None:
            raise InvalidRequestError("the model has no chat template: use completions", param="messages")
        ids: list[int] = []
        for text, from_user in self._template.render(messages):
            ids += self._encode_plain(text) if from_user else self._full.encode(text, add_special_tokens=False).ids
        return tuple(ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of tokens without the special ones; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i) for i in token_ids if not self.is_special(i)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; b"" for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(_encodable(text), add_special_tokens=False).ids
        return ids


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _is_byte_level(spec: dict[str, Any]) -> bool:
    pre = spec.get("pre_tokenizer") or {}
    steps = [pre, *pre.get("pretokenizers", [])]
    return (spec.get("model") or {}).get("type") == "BPE" and any(step.get("type") == "ByteLevel" for step in steps)


def _without_added_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer in which no added token exists, neither as an added token nor as the result of a merge."""
    added = {entry["content"] for entry in spec.get("added_tokens") or []}
    plain = copy.copy(spec)
    model = plain["model"] = dict(spec["model"])
    plain["added_tokens"], plain["post_processor"] = [], None
    model["vocab"] = {token: index for token, index in model["vocab"].items() if token not in added}
    model["merges"] = [
        merge
        for merge in model["merges"]
        if added.isdisjoint(pair := merge.split(" ") if isinstance(merge, str) else merge)
        and "".join(pair) not in added
    ]
    if model.get("unk_token") in added:
        model["unk_token"] = None
    return plain


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table of printable characters for bytes, the other way round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTES = _byte_of_character()


def _to_bytes(token: str) -> bytes:
    """A token that is no byte-level spelling (a padding entry) gives its own characters."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()
