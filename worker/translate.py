"""A wire request to the engine's request. The only place that knows both vocabularies."""

import hashlib
from collections.abc import Sequence

from engine.api import ChatMessage, GenerateRequest, GenerationEngine, PriorityClass
from engine.errors import ContextLengthExceededError
from engine.sampling_params import SamplingParams
from topics.codec import PromptRequest
from topics.errors import ErrorCode, InvalidMessage
from topics.requests import ChatCompletionRequest, RequestBody


def derived_seed(request_id: str, seed: int = 0) -> int:
    """The seed of a request that names none: the same for every attempt of one request id under one `seed` setting."""
    named = request_id if not seed else f"{seed}\0{request_id}"  # no id has a NUL: ids are printable
    return int.from_bytes(hashlib.sha256(named.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def translate(
    prompt: PromptRequest,
    engine: GenerationEngine,
    *,
    attempt: str,
    model_names: Sequence[str],
    tenant: str,
    priority: PriorityClass,
    max_output_tokens: int,
    arrival_seconds: float,
    prefill_chunk: int | None = None,
    seed: int = 0,
) -> GenerateRequest:
    """The engine's request, checked to be able to run. Encodes text, so it may run in a thread.

    `max_tokens` is clamped to `max_output_tokens` and to what the context leaves; a prompt that leaves no room is
    refused. `seed` takes part where the body names none.
    Raises InvalidMessage (`model_not_found`) and what `GenerationEngine.check` raises.
    """
    body = prompt.body
    if body.model is not None and body.model not in model_names:
        served = " or ".join(model_names)
        raise InvalidMessage(ErrorCode.MODEL_NOT_FOUND, f"model must be {served}, or left out", "model")
    if isinstance(body, ChatCompletionRequest):
        tokens = engine.encode_chat([ChatMessage(message.role, message.content) for message in body.messages])
    else:
        tokens = engine.encode_text(body.prompt)
    room = engine.model.max_model_len - len(tokens)
    if room < 1:
        raise ContextLengthExceededError(
            f"the prompt has {len(tokens)} tokens, the model takes {engine.model.max_model_len} with the answer",
            param="messages" if isinstance(body, ChatCompletionRequest) else "prompt",
        )
    request = GenerateRequest(
        request_id=f"{prompt.request_id}-{attempt}",
        prompt_token_ids=tokens,
        params=_sampling(body, derived_seed(prompt.request_id, seed), min(room, max_output_tokens)),
        priority=priority,
        tenant=tenant,
        operation=prompt.operation,
        arrival_seconds=arrival_seconds,
        prefill_chunk=prefill_chunk,
    )
    engine.check(request)
    return request


def _sampling(body: RequestBody, default_seed: int, most_tokens: int) -> SamplingParams:
    asked = body.max_output_tokens
    return SamplingParams(
        max_tokens=most_tokens if asked is None else min(asked, most_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=default_seed if body.seed is None else body.seed,
        n=body.n,
        stop=body.stop,
        stop_token_ids=frozenset(body.stop_token_ids),
        logit_bias=body.logit_bias,
        logprobs=body.num_logprobs,
        ignore_eos=body.ignore_eos,
    )
