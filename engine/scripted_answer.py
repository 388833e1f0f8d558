"""What the scripted engine answers: a function of the prompt's tokens alone, and the tokens themselves."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence

TURN_START, TURN_END = 256, 257
VOCAB_SIZE = 258
_LENGTH = re.compile(r"\[\[tokens=([0-9]{1,6})\]\]")
_WORDS = (
    *("amber", "birch", "cloud", "delta", "ember", "fjord", "grove", "heron", "inlet", "juniper", "kelp", "lark"),
    *("meadow", "north", "otter", "pine", "quartz", "river", "stone", "thistle", "umber", "violet", "willow", "yarrow"),
)


class ByteTokenizer:
    """One token a byte, and two control tokens that no text can spell."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if 0 <= token_id < TURN_START else b""

    def is_special(self, token_id: int) -> bool:
        return token_id >= TURN_START


def scripted_answer(
    prompt_token_ids: Sequence[int], max_tokens: int, choice: int = 0, *, ignore_eos: bool = False
) -> str:
    """The whole answer to a prompt, before stop strings cut it; at most `max_tokens` characters, all ASCII."""
    length = answer_length(prompt_token_ids, max_tokens, choice, ignore_eos)
    return answer_bytes(prompt_token_ids, length, choice).decode("ascii")


def prompt_text(prompt_token_ids: Sequence[int]) -> str:
    return bytes(token for token in prompt_token_ids if token < TURN_START).decode("utf-8", "replace")


def answer_length(prompt_token_ids: Sequence[int], max_tokens: int, choice: int, ignore_eos: bool) -> int:
    """16 to 143 tokens unless the prompt says how many."""
    if ignore_eos:
        return max_tokens
    named = _LENGTH.search(prompt_text(prompt_token_ids))
    natural = max(1, int(named[1])) if named else 16 + _digest(prompt_token_ids, choice, 0)[0] % 128
    return min(max_tokens, natural)


def answer_bytes(prompt_token_ids: Sequence[int], length: int, choice: int) -> bytes:
    answer = bytearray()
    for byte in _bytes(prompt_token_ids, choice):
        if len(answer) >= length:
            break
        answer += _WORDS[byte % len(_WORDS)].encode() + b" "
    return bytes(answer[:length])


def _bytes(prompt_token_ids: Sequence[int], choice: int) -> Iterator[int]:
    for counter in itertools.count(1):
        yield from _digest(prompt_token_ids, choice, counter)


def _digest(prompt_token_ids: Sequence[int], choice: int, counter: int) -> bytes:
    prompt = b"".join(token.to_bytes(2, "big") for token in prompt_token_ids)
    return hashlib.sha256(prompt + choice.to_bytes(2, "big") + counter.to_bytes(4, "big")).digest()
