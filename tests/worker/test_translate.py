"""A wire request as the engine gets it."""

from engine.api import GenerateRequest, PriorityClass
from engine.scripted import ScriptedEngine
from topics.codec import PromptRequest
from topics.requests import CHAT_COMPLETIONS, validate_body
from worker.translate import translate


def engine_request(
    request_id: str = "r", attempt: str = "1", worker_seed: int = 0, **fields: object
) -> GenerateRequest:
    body, _ = validate_body(CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": "hello"}], **fields})
    return translate(
        PromptRequest(request_id, CHAT_COMPLETIONS, body),
        ScriptedEngine(max_model_len=100),
        attempt=attempt,
        model_names=("scripted",),
        tenant="t",
        priority=PriorityClass.BULK,
        max_output_tokens=20,
        arrival_seconds=1.0,
        seed=worker_seed,
    )


def test_a_second_attempt_says_the_same() -> None:
    """Without a seed one is derived from the request id alone; a seed of the client is kept, 0 included."""
    first, second = engine_request(attempt="1"), engine_request(attempt="2")
    assert first.request_id != second.request_id and first.params == second.params
    assert engine_request("other").params.seed != first.params.seed
    assert engine_request(seed=0).params.seed == 0


def test_the_seed_of_the_worker_changes_what_is_drawn_and_yields_to_that_of_a_request() -> None:
    """The same under the same setting, something else under another one; a client's own seed stays as it is."""
    assert engine_request(worker_seed=7).params.seed == engine_request(worker_seed=7).params.seed
    assert len({engine_request(worker_seed=seed).params.seed for seed in (0, 7, 8)}) == 3
    assert engine_request(worker_seed=7, seed=5).params.seed == 5


def test_max_tokens_is_clamped_to_the_worker_and_to_the_context() -> None:
    """A billion asks for all there is, nothing asked for is the worker's limit."""
    assert engine_request(max_tokens=10**9).params.max_tokens == 20
    assert engine_request().params.max_tokens == 20
    assert engine_request(max_tokens=3).params.max_tokens == 3
    long = engine_request(messages=[{"role": "user", "content": "a" * 68}])
    assert len(long.prompt_token_ids) + long.params.max_tokens == 100
