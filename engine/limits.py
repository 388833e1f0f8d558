"""What can never run, and is refused at once."""

from engine.config import EngineConfig
from engine.errors import CacheCapacityError, ContextLengthExceededError, InvalidRequestError


def check_request(config: EngineConfig, max_blocks: int, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raises for no prompt, one longer than the context, and where prompt and answer need more than `max_blocks`."""
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    if num_prompt_tokens >= config.max_model_len:
        raise ContextLengthExceededError(
            f"the prompt has {num_prompt_tokens} tokens, the model takes at most {config.max_model_len - 1}",
            param="prompt",
        )
    total = min(num_prompt_tokens + max_tokens, config.max_model_len)
    num_blocks = -(-total // config.block_size)
    if num_blocks > max_blocks:
        where = "the cache has" if max_blocks == config.num_blocks else "cache and SSD together have"
        raise CacheCapacityError(
            f"prompt and answer need {num_blocks} KV blocks, {where} {max_blocks}", param="max_tokens"
        )
