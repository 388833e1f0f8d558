"""What loading a model gives to an engine."""

from dataclasses import dataclass

from engine.api import ModelInfo
from engine.core import EngineCore
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The public facts, the tokenizer, the core, and what salts the prefix cache: the digest of the weights and the
    layout of the cache."""

    info: ModelInfo
    tokenizer: Tokenizer
    core: EngineCore
    digest: str
    layout_id: str
