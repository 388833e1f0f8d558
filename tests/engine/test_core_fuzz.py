"""The bookkeeping of the engine holds under random work, on a runner that needs no model."""

import random

import pytest

from engine.api import FinishReason, PriorityClass
from engine.batch import Layers, SampledRow, ScheduledBatch
from engine.cache.block import root_hash
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import CacheCapacityError, ContextLengthExceededError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.step_result import StepResult

VOCABULARY = 97
LAYERS = 3
ROOT = root_hash(tenant="", model_digest="test", layout_id="test")


def next_token(tokens: list[int]) -> int:
    """A model whose every token depends on all tokens before it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCABULARY


def expected(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class CacheCheckingRunner:
    """Keeps token ids where a model keeps KV and answers from what it reads there: a wrong block, a wrong answer."""

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.block_size
        self.cells: list[list[int | None]] = [[None] * (config.num_blocks * config.block_size) for _ in range(LAYERS)]
        self.fail_on: set[str] = set()
        self.fail_steps = 0
        self.batch = ScheduledBatch()

    def segments(self, batch: ScheduledBatch) -> list[Layers]:
        return [(layer, layer + 1) for layer in range(LAYERS)]

    def launch(self, batch: ScheduledBatch, layers: Layers) -> None:
        self.batch = batch
        cells = self.cells[layers[0]]
        for row in batch.rows:
            for position, token in enumerate(row.token_ids, start=row.start):
                cells[row.block_table[position // self.size] * self.size + position % self.size] = token
        if self.fail_steps or any(row.request_id in self.fail_on for row in batch.rows):
            self.fail_steps = max(0, self.fail_steps - 1)
            raise RuntimeError("made to fail")

    def sample(self) -> None:
        pass

    def collect(self) -> list[SampledRow]:
        sampled = []
        for row in self.batch.rows:
            if row.sample:
                length = row.start + len(row.token_ids)
                slots = [row.block_table[p // self.size] * self.size + p % self.size for p in range(length)]
                read = [cells[slot] for slot in slots for cells in self.cells]
                assert None not in read
                assert all(len(set(read[i : i + LAYERS])) == 1 for i in range(0, len(read), LAYERS)), "half a token"
                sampled.append(SampledRow(row.request_id, next_token([t for t in read[::LAYERS] if t is not None])))
        return sampled


class RandomDoor:
    """Between two layers urgent requests come in, and anything may be aborted."""

    def __init__(self, core: EngineCore, rng: random.Random, alive: dict[str, Request]) -> None:
        self.core, self.rng, self.alive = core, rng, alive
        self.results: list[StepResult] = []
        self.num_looks = 0

    def look(self) -> None:
        self.num_looks += 1
        if self.rng.random() < 0.1:
            prompt = tuple(self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(1, 12)))
            urgent = request(f"u{self.num_looks}", prompt, self.rng.randrange(1, 4), priority=PriorityClass.URGENT)
            self.core.add(urgent)
            self.alive[urgent.request_id] = urgent
        if self.rng.random() < 0.03 and self.alive:
            self.core.abort(self.alive.pop(self.rng.choice(list(self.alive))).request_id)

    def publish(self, result: StepResult) -> None:
        self.results.append(result)


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 8, **fields: object) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), ROOT, **fields)  # type: ignore[arg-type]


def make_core(**sizes: int) -> tuple[EngineCore, CacheCheckingRunner]:
    config = EngineConfig(
        **{
            "block_size": 4,
            "num_blocks": 24,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 20,
            "max_model_len": 64,
            **sizes,
        }
    )
    runner = CacheCheckingRunner(config)
    return EngineCore(config, runner, clock=lambda: 0.0, check=True), runner


def run(core: EngineCore, max_steps: int = 500) -> dict[str, Request]:
    done: dict[str, Request] = {}
    for _ in range(max_steps):
        done.update((r.request_id, r) for r in core.step().finished)
        if not core.has_work:
            return done
    raise AssertionError(f"still working: {core.scheduler!r}")


@pytest.mark.parametrize("seed", range(4))
def test_random_add_step_abort_preempt_evict_and_failures_keep_every_answer_right(seed: int) -> None:
    """2,000 random events, `check()` after every step: blocks add up and every finished answer is the right one."""
    rng = random.Random(seed)
    core, runner = make_core()
    stems = [tuple(rng.randrange(VOCABULARY) for _ in range(20)) for _ in range(3)]
    alive: dict[str, Request] = {}
    door = RandomDoor(core, rng, alive)
    num_finished = 0
    for event in range(2_000):
        kind = rng.random()
        if kind < 0.25 and len(alive) < 20:
            stem = rng.choice(stems)[: rng.randrange(1, 20)]
            prompt = stem + tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(10)))
            added = request(
                f"r{event}",
                prompt,
                rng.randrange(1, 12),
                priority=rng.choice(list(PriorityClass)),
                arrival_seconds=float(event),
            )
            core.add(added)
            alive[added.request_id] = added
        elif kind < 0.32 and alive:
            core.abort(alive.pop(rng.choice(list(alive))).request_id)
        elif kind < 0.38 and alive:
            core.preempt_if_running(rng.choice(list(alive)))
        elif kind < 0.40:
            core.cache.pool.evict_all()
        elif kind < 0.42:
            runner.fail_steps = 1
        core.scheduler.check()
        door.results = []
        door.publish(core.step(door))
        for finished in (request for result in door.results for request in result.finished):
            aborted = alive.pop(finished.request_id, None) is None
            if finished.finish_reason is FinishReason.LENGTH:
                num_finished += not aborted
                assert finished.output_token_ids == expected(finished.prompt_token_ids, finished.params.max_tokens)
    for finished in run(core).values():
        assert finished.output_token_ids == expected(finished.prompt_token_ids, finished.params.max_tokens)
    core.cache.pool.evict_all()
    core.scheduler.check()
    assert core.cache.pool.num_used == 0
    assert num_finished > 50
    assert core.stats().interrupts_total > 50


def test_a_failing_request_fails_alone_and_its_readers_go_on() -> None:
    """Readers of a failing writer's pending blocks are rescheduled, and only the writer ends with an error."""
    core, runner = make_core()
    prompt = tuple(range(12))
    core.add(request("bad", (*prompt, 90)))
    core.add(request("good", (*prompt, 91)))
    runner.fail_on = {"bad"}
    done = run(core)
    assert done["bad"].finish_reason is FinishReason.ERROR
    assert done["good"].output_token_ids == expected((*prompt, 91), 8)


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    """Requests of one burst read the prefix that the first of them writes in the same step."""
    core, _ = make_core(num_blocks=64, max_num_batched_tokens=64)
    prompt = tuple(range(16))
    for index in range(4):
        core.add(request(f"r{index}", (*prompt, 60 + index), arrival_seconds=float(index)))
    core.step()
    assert [r.num_cached_tokens for r in core.scheduler.running] == [0, 16, 16, 16]
    assert all(r.output_token_ids == expected(r.prompt_token_ids, 8) for r in run(core).values())


def test_a_request_waits_for_a_prefix_that_is_still_being_written_and_takes_over_if_the_writer_goes() -> None:
    """A promised prefix is waited for; an aborted writer's promise passes to a waiter."""
    core, _ = make_core(max_num_batched_tokens=8, max_num_seqs=4, prefill_chunk_size=8)
    prompt = tuple(range(24))
    core.add(request("writer", (*prompt, 1), arrival_seconds=0.0))
    core.add(request("reader", (*prompt, 2), arrival_seconds=1.0))
    core.step()
    core.step()
    assert [r.request_id for r in core.scheduler.running] == ["writer"]
    core.abort("writer")
    done = run(core)
    assert done["reader"].output_token_ids == expected((*prompt, 2), 8)
    assert done["reader"].num_cached_tokens == 16


def test_an_urgent_arrival_takes_a_slot_of_a_full_batch_in_the_next_step() -> None:
    """With every slot taken by bulk work an urgent request runs in the very next step."""
    core, _ = make_core(max_num_seqs=2, num_blocks=64)
    for index in range(2):
        core.add(request(f"bulk{index}", (index, 1, 2), 30, priority=PriorityClass.BULK))
    core.step()
    core.add(request("urgent", (9, 9, 9), 4, priority=PriorityClass.URGENT))
    result = core.step()
    assert "urgent" in {r.request_id for r, _ in result.advanced}
    assert all(r.output_token_ids == expected(r.prompt_token_ids, r.params.max_tokens) for r in run(core).values())


def test_nobody_is_preempted_for_an_urgent_request_that_would_not_fit_even_then() -> None:
    """Where another urgent request holds the room, work of lower classes goes on: its loss would serve nobody."""
    core, _ = make_core(max_model_len=96)
    core.add(request("first", tuple(range(8)), 64, priority=PriorityClass.URGENT))
    core.add(request("bulk", tuple(range(30, 34)), 12, priority=PriorityClass.BULK, arrival_seconds=1.0))
    core.step()
    core.add(request("second", tuple(range(50, 58)), 40, priority=PriorityClass.URGENT, arrival_seconds=2.0))
    result = core.step()
    assert {r.request_id for r, _ in result.advanced} == {"first", "bulk"}
    assert core.scheduler.num_preemptions == 0
    assert all(r.output_token_ids == expected(r.prompt_token_ids, r.params.max_tokens) for r in run(core).values())


def test_what_can_never_run_is_refused_at_once() -> None:
    """Too long for the context or for the cache is an error at add, not a request that waits for ever."""
    core, _ = make_core(max_model_len=200)
    with pytest.raises(ContextLengthExceededError, match="200 tokens"):
        core.add(request("long", (1,) * 200))
    with pytest.raises(CacheCapacityError, match="KV blocks"):
        core.add(request("large", (1,) * 50, max_tokens=100))


def test_after_a_failed_step_everybody_ends_although_all_together_outgrow_the_cache() -> None:
    """Who runs alone after a failure gets its room from the others: nothing else would ever make it."""
    core, runner = make_core(num_blocks=24)
    for index in range(40):
        core.scheduler.lengths.observe(
            request(f"short{index}", (1,), output_token_ids=[1])
        )  # so that all are admitted as short ones
    for index, name in enumerate("abc"):
        core.add(request(name, tuple(range(20 * index, 20 * index + 8)), 40, arrival_seconds=float(index)))
    for _ in range(6):
        core.step()
    assert len(core.scheduler.running) == 3
    runner.fail_steps = 1
    core.step()
    done = run(core)
    assert {name: r.output_token_ids for name, r in done.items()} == {
        r.request_id: expected(r.prompt_token_ids, 40) for r in done.values()
    }
    assert len(done) == 3


class OneArrival:
    """Hands one urgent request in when the first layer of a step has run, and remembers what came out inside it."""

    def __init__(self, core: EngineCore, arrival: Request) -> None:
        self.core, self.arrival = core, arrival
        self.inside: list[str] = []
        self.added = False

    def look(self) -> None:
        if not self.added:
            self.added = True
            self.core.add(self.arrival)

    def publish(self, result: StepResult) -> None:
        self.inside += [request.request_id for request, _ in result.advanced]


def test_an_urgent_request_that_comes_in_the_middle_of_a_step_has_its_first_token_before_the_step_ends() -> None:
    """And shares nothing with what the parked step has half written; later tokens come with everybody's."""
    core, _ = make_core(num_blocks=64, max_num_batched_tokens=64)
    prompt = tuple(range(16))
    core.add(request("bulk", prompt, priority=PriorityClass.BULK))
    door = OneArrival(core, request("urgent", (*prompt, 90), 4, priority=PriorityClass.URGENT))
    result = core.step(door)
    assert door.inside == ["urgent"]
    assert [r.request_id for r, _ in result.advanced] == ["bulk"]
    assert door.arrival.num_cached_tokens == 0
    done = run(core)
    assert done["urgent"].output_token_ids == expected((*prompt, 90), 4)
    assert done["bulk"].output_token_ids == expected(prompt, 8)


def test_a_request_aborted_in_the_step_that_runs_keeps_its_blocks_until_the_step_has_ended() -> None:
    """Otherwise an urgent request inside the step would write where its rows are still written to."""
    core, _ = make_core(max_num_batched_tokens=64)

    class Aborting(OneArrival):
        def look(self) -> None:
            self.core.abort("bulk")
            super().look()

    core.add(request("bulk", tuple(range(16)), priority=PriorityClass.BULK))
    door = Aborting(core, request("urgent", (90, 91), 1, priority=PriorityClass.URGENT))
    core.step(door)
    assert door.inside == ["urgent"]
    assert not core.has_work and core.cache.pool.num_used == 0


def test_without_interrupts_an_urgent_request_waits_for_the_end_of_the_step() -> None:
    """The setting that turns them off does so."""
    core, _ = make_core(enable_interrupts=False)
    core.add(request("bulk", tuple(range(16)), priority=PriorityClass.BULK))
    door = OneArrival(core, request("urgent", (90, 91), 1, priority=PriorityClass.URGENT))
    core.step(door)
    assert door.inside == []


def test_a_long_urgent_prompt_goes_on_at_each_boundary_until_its_first_token() -> None:
    """Its chunks run one by one between the layers of the parked step, which gets on between any two of them."""
    core, _ = make_core(num_blocks=64, max_num_batched_tokens=64, prefill_chunk_size=16)
    core.add(request("bulk", tuple(range(16)), priority=PriorityClass.BULK))
    door = OneArrival(core, request("urgent", tuple(range(40, 60)), 2, priority=PriorityClass.URGENT))
    result = core.step(door)
    assert door.inside == ["urgent"] and [r.request_id for r, _ in result.advanced] == ["bulk"]
    assert core.stats().interrupts_total == 2
    assert run(core)["urgent"].output_token_ids == expected(tuple(range(40, 60)), 2)


def test_urgent_prompts_that_come_between_two_steps_do_not_share_one_with_a_long_prefill() -> None:
    """They have a step for themselves, and the next one is for everybody again, whatever comes."""
    core, _ = make_core(num_blocks=64, max_num_batched_tokens=64, max_num_seqs=12, prefill_chunk_size=8)
    bulk = request("bulk", tuple(range(48)), 10, priority=PriorityClass.BULK)
    core.add(bulk)
    core.step()
    for number in range(3):
        core.add(request(f"urgent{number}", (90, number), 4, priority=PriorityClass.URGENT))
        advanced = [r.request_id for r, _ in core.step().advanced]
        assert advanced == [f"urgent{number}"]
        core.add(request(f"more{number}", (80, number), 4, priority=PriorityClass.URGENT))
        computed = bulk.num_computed_tokens
        core.step()
        assert bulk.num_computed_tokens == computed + 8
    assert all(r.output_token_ids == expected(r.prompt_token_ids, r.params.max_tokens) for r in run(core).values())
