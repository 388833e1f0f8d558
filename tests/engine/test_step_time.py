"""The fit of step times finds the parts of a cost, and is not led astray by one slow step."""

import random

from engine.step_time import StepLoad, StepTimeModel


def cost(load: StepLoad) -> float:
    return 0.004 + 4e-4 * load.num_prefill_tokens + 1e-3 * load.num_decodes + 2e-7 * load.num_keys_read


def some_load(rng: random.Random) -> StepLoad:
    load = StepLoad()
    for _ in range(rng.randrange(1, 30)):
        load = load.plus(rng.randrange(1500), 1)
    return load.plus(rng.randrange(1000), rng.randrange(2, 500)) if rng.random() < 0.5 else load


def test_the_four_parts_are_found_under_noise() -> None:
    """200 steps with 10 % noise and a neighbour's pause now and then; errors are counted."""
    rng, model = random.Random(1), StepTimeModel()
    for _ in range(200):
        load = some_load(rng)
        model.observe(load, cost(load) * rng.uniform(0.9, 1.1) * (20 if rng.random() < 0.02 else 1))
    for _ in range(50):
        load = some_load(rng)
        assert abs(model.predict_seconds(load) - cost(load)) < 0.2 * cost(load) + 0.005
    assert model.error_seconds_total > 0


def test_a_chunk_is_cut_to_the_target_and_left_alone_before_there_is_a_fit() -> None:
    """The largest chunk whose step is expected within the target."""
    model, rng = StepTimeModel(), random.Random(2)
    assert model.max_prefill_tokens(StepLoad(), 0, 0.001, 512) == 512
    for _ in range(100):
        load = some_load(rng)
        model.observe(load, cost(load))
    tokens = model.max_prefill_tokens(StepLoad(0, 10, 5000), 100, 0.1, 512)
    assert cost(StepLoad(0, 10, 5000).plus(100, tokens)) <= 0.105
    assert cost(StepLoad(0, 10, 5000).plus(100, tokens + 20)) > 0.1


def test_steps_that_are_all_alike_leave_the_model_sane() -> None:
    """5,000 equal steps say nothing of other loads: what is known stays, and a new kind of step is learned at once."""
    model, decode = StepTimeModel(), StepLoad(0, 8, 4000)
    for _ in range(5000):
        model.observe(decode, 0.01)
    assert abs(model.predict_seconds(decode) - 0.01) < 1e-4
    for _ in range(20):
        model.observe(StepLoad(256, 8, 40_000), 0.1)
    assert abs(model.predict_seconds(StepLoad(256, 8, 40_000)) - 0.1) < 0.02
