"""Who runs, who waits and who gives way, on a core whose runner needs no model."""

from engine.api import Decision, FinishReason, PriorityClass
from engine.batch import Layers, SampledRow, ScheduledBatch
from engine.cache.block import root_hash
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.fairness import TenantCounters
from engine.policy import PriorityPolicy
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.step_time import StepLoad
from engine.thermal import ScriptedSensor, ThermalGovernor, ThermalPolicy, ThermalReading

ROOT = root_hash(tenant="", model_digest="m", layout_id="l")


class OneTokenRunner:
    """Every row that asks gets token 1."""

    def __init__(self) -> None:
        self.fail_steps = 0
        self.failure: Exception = RuntimeError("made to fail")
        self.batch = ScheduledBatch()

    def segments(self, batch: ScheduledBatch) -> list[Layers]:
        return [(0, 1)]

    def launch(self, batch: ScheduledBatch, layers: Layers) -> None:
        self.batch = batch
        if self.fail_steps:
            self.fail_steps -= 1
            raise self.failure

    def sample(self) -> None:
        pass

    def collect(self) -> list[SampledRow]:
        return [SampledRow(row.request_id, 1) for row in self.batch.rows if row.sample]


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 8, **fields: object) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), ROOT, **fields)  # type: ignore[arg-type]


def core_of(*, now: float = 0.0, **sizes: float) -> EngineCore:
    defaults = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 96}
    return EngineCore(EngineConfig(**{**defaults, **sizes}), OneTokenRunner(), clock=lambda: now, check=True)


def names(core: EngineCore) -> list[str]:
    return [r.request_id for r in core.scheduler.running]


def finish(core: EngineCore, max_steps: int = 300) -> None:
    for _ in range(max_steps):
        core.step()
        if not core.has_work:
            return
    raise AssertionError(f"still working: {core.scheduler!r}")


def learn_short_answers(core: EngineCore) -> None:
    """So many short answers that a length of 1 is expected."""
    for index in range(20):
        core.add(request(f"short{index}", (9, index), 1))
    finish(core)
    assert core.scheduler.lengths.remaining_tokens(request("r", (1,), 50)) == 1


def test_waiting_lifts_a_class_and_arrival_decides_within_one() -> None:
    """Bulk that has waited long enough comes before a standard newcomer, and never before an urgent one."""
    policy = PriorityPolicy(ageing_seconds=30)
    bulk = request("bulk", (1,), priority=PriorityClass.BULK, arrival_seconds=0.0)
    standard = request("standard", (1,), arrival_seconds=20.0)
    urgent = request("urgent", (1,), priority=PriorityClass.URGENT, arrival_seconds=500.0)
    assert policy.order([bulk, standard, urgent], 20.0) == [urgent, standard, bulk]
    assert policy.order([standard, bulk, urgent], 600.0) == [urgent, bulk, standard]


def test_the_victim_of_an_urgent_request_is_of_the_lowest_class_with_least_to_lose_and_none_for_ever() -> None:
    """Nobody gives way for less than urgent work, nor more often than the policy says, nor twice at one token."""
    policy = PriorityPolicy(max_preemptions=3)
    urgent = request("urgent", (1,), priority=PriorityClass.URGENT, arrival_seconds=9.0)
    early = request("early", (1,), priority=PriorityClass.BULK, arrival_seconds=1.0)
    late = request("late", (1,), priority=PriorityClass.BULK, arrival_seconds=2.0)
    far = request("far", (1,), priority=PriorityClass.BULK, arrival_seconds=3.0, num_computed_tokens=90)
    standard = request("standard", (1,), arrival_seconds=3.0)
    running = [early, standard, late, far]
    assert policy.victim_for(urgent, running) is late
    assert policy.victim_for(standard, [early, late]) is None
    late.num_preemptions = 3
    assert policy.victim_for(urgent, running) is early
    early.num_preemptions, early.num_tokens_when_preempted = 1, early.num_tokens
    assert policy.victim_for(urgent, running) is far


def test_blocks_are_not_promised_twice() -> None:
    """Without history every answer is expected at full length: a second request that would not fit beside it waits."""
    core = core_of()
    for index, name in enumerate(("first", "second")):
        core.add(request(name, tuple(range(20 * index, 20 * index + 8)), 44, arrival_seconds=float(index)))
    core.step()
    assert names(core) == ["first"]
    finish(core)
    assert core.scheduler.num_preemptions == 0


def test_shared_blocks_count_against_the_cache_too() -> None:
    """8 shared blocks and 3 private ones for each of two requests are more than 13."""
    core = core_of(num_blocks=13)
    prefix = tuple(range(32))
    core.add(request("first", (*prefix, 40), 7))
    core.step()
    core.step()
    core.add(request("second", (*prefix, 41), 7, arrival_seconds=1.0))
    core.step()
    assert names(core) == ["first"]
    finish(core)
    assert core.scheduler.num_preemptions == 0


def test_history_admits_more_and_shortage_takes_the_latest() -> None:
    """Answers that were short so far are expected short; when they are not, the later one gives way and is finished."""
    core = core_of()
    learn_short_answers(core)
    early, late = request("early", tuple(range(8)), 60), request("late", tuple(range(20, 28)), 60, arrival_seconds=1.0)
    core.add(early)
    core.add(late)
    core.step()
    assert names(core) == ["early", "late"]
    finish(core)
    assert early.num_preemptions == 0 and late.num_preemptions >= 1
    assert len(early.output_token_ids) == len(late.output_token_ids) == 60


def test_a_promised_prefix_is_waited_for_but_not_for_ever() -> None:
    """With room in the batch a reader still waits for the writer of its prefix; after some steps it goes by itself."""
    core = core_of(num_blocks=64, prefill_chunk_size=8)
    prefix = tuple(range(24))
    reader = request("reader", (*prefix, 2), arrival_seconds=1.0)
    core.add(request("writer", (*prefix, 1)))
    core.add(reader)
    core.step()
    assert names(core) == ["writer"]
    finish(core)
    assert reader.num_cached_tokens == 24
    slow = core_of(num_blocks=64, prefill_chunk_size=1)
    slow.add(request("writer", tuple(range(60))))
    slow.add(request("reader", tuple(range(60)), arrival_seconds=1.0))
    for _ in range(20):
        slow.step()
    assert names(slow) == ["writer"], "the block in which a chunk ends is promised too"
    for _ in range(20):
        slow.step()
    assert names(slow) == ["writer", "reader"]


def test_the_chunk_size_bounds_what_a_request_prefills_in_a_step() -> None:
    """12 tokens in chunks of 5 give their first token in the third step."""
    core = core_of(prefill_chunk_size=5)
    core.add(request("r", tuple(range(12))))
    assert [len(core.step().advanced) for _ in range(3)] == [0, 0, 1]


def test_the_context_ends_an_answer() -> None:
    """60 tokens of 64 leave 4 for the answer."""
    core = core_of(max_model_len=64)
    long = request("long", tuple(range(60)), 30)
    core.add(long)
    finish(core)
    assert len(long.output_token_ids) == 4 and long.finish_reason is FinishReason.LENGTH


def test_two_failures_far_apart_do_not_end_a_request() -> None:
    """Only one that fails again when it is run alone is at fault."""
    core = core_of()
    runner = core.runner
    assert isinstance(runner, OneTokenRunner)
    asked = request("r", (1, 2, 3), 6)
    core.add(asked)
    for _ in range(2):
        runner.fail_steps = 1
        core.step()
        core.step()
    finish(core)
    assert asked.finish_reason is FinishReason.LENGTH and len(asked.output_token_ids) == 6


def test_a_request_does_not_count_its_own_blocks_as_cached_after_a_preemption() -> None:
    """The usage tells the client what others had computed before."""
    core = core_of()
    asked = request("r", tuple(range(16)), 8)
    core.add(asked)
    core.step()
    core.preempt_if_running("r")
    core.step()
    assert asked.num_computed_tokens > 0 and asked.num_cached_tokens == 0
    finish(core)
    assert asked.num_cached_tokens == 0


def test_one_starving_request_at_a_time_goes_before_urgent_ones() -> None:
    """Under urgent work without end bulk gets on, but only one of it: the others keep their place behind."""
    core = core_of(max_num_seqs=2, num_blocks=64)
    for index in range(3):
        core.add(request(f"bulk{index}", (index, 7), 8, priority=PriorityClass.BULK, arrival_seconds=-100.0 + index))
    for index in range(3):
        core.add(request(f"urgent{index}", (index, 8), 8, priority=PriorityClass.URGENT))
    core.step()
    assert names(core) == ["bulk0", "urgent0"]
    finish(core)
    assert core.scheduler.decisions[Decision.STARVING] == 3
    assert core.scheduler.num_preemptions == 0


def test_tenants_share_a_class_by_the_tokens_they_have_had() -> None:
    """Ten prompts of one tenant that came first do not keep another tenant's single prompt waiting."""
    core = core_of(max_num_seqs=1, num_blocks=64)
    for index in range(10):
        core.add(request(f"many{index}", (index, 7, 7, 7), 4, tenant="a", arrival_seconds=float(index)))
    core.step()
    core.add(request("one", (9, 9), 4, tenant="b", arrival_seconds=50.0))
    order = []
    while core.has_work:
        order += [r.request_id for r in core.step().finished]
    assert order[:2] == ["many0", "one"]


def test_time_away_earns_a_tenant_no_credit() -> None:
    """Who comes back is lifted to the least of those who are there."""
    tenants = TenantCounters()
    busy, idle = request("busy", (1,), tenant="a"), request("idle", (1,), tenant="b")
    tenants.entered(busy)
    tenants.charge(busy, 500)
    tenants.entered(idle)
    assert tenants.served(idle) == tenants.served(busy) == 500
    tenants.charge(idle, 1)
    assert tenants.served(idle) == 502
    for index in range(3000):
        other = request(f"r{index}", (1,), tenant=f"t{index}")
        tenants.entered(other)
        tenants.left(other)
    assert repr(tenants) == "TenantCounters(active=2, known=1024)"


def test_whoever_decodes_has_its_token_in_every_step_beside_any_prefill() -> None:
    """An urgent prompt that could fill the step leaves a token for each running answer."""
    core = core_of(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=64)
    for index in range(3):
        core.add(request(f"r{index}", (index, 1), 20))
    core.step()
    core.add(request("urgent", tuple(range(40)), 4, priority=PriorityClass.URGENT))
    for _ in range(6):
        assert {r.request_id for r, _ in core.step().advanced} >= {"r0", "r1", "r2"}


def test_a_shorter_request_is_squeezed_into_what_the_head_cannot_use_until_the_head_has_aged() -> None:
    """It fits beside those that run and the head does not; after the ageing bound the head's room is kept for it."""
    for now, expected in ((1.0, ["first", "short"]), (40.0, ["first"])):
        core = core_of(num_blocks=16, now=now)
        core.add(request("first", tuple(range(8)), 24))
        core.step()
        core.add(request("head", tuple(range(20, 28)), 36, arrival_seconds=1.0))
        core.add(request("short", (50, 51), 4, arrival_seconds=2.0))
        core.step()
        assert names(core) == expected
        assert core.scheduler.decisions[Decision.SQUEEZED_IN] == len(expected) - 1
        finish(core)


def test_after_a_shortage_nobody_starts_who_would_give_way_again() -> None:
    """An overrun is expected to last: who gave way for it comes back when there is room, not in the next step."""
    core = core_of(num_blocks=24)
    learn_short_answers(core)
    for index, name in enumerate(("early", "late")):
        core.add(request(name, tuple(range(20 * index, 20 * index + 8)), 60, arrival_seconds=float(index)))
    while not core.scheduler.num_preemptions:
        core.step()
    core.step()
    assert names(core) == ["early"]
    finish(core)
    assert core.scheduler.num_preemptions == 1


def test_reserved_slots_and_blocks_are_for_urgent_requests_only() -> None:
    """With bulk work up to its limit an urgent request starts inside the step, and nobody gives way."""
    core = core_of(num_blocks=24, max_num_seqs=4, urgent_reserved_seqs=1, urgent_reserved_blocks=4)
    for index in range(4):
        prompt = tuple(range(20 * index, 20 * index + 8))
        core.add(request(f"bulk{index}", prompt, 16, priority=PriorityClass.BULK, arrival_seconds=float(index)))
    core.step()
    assert names(core) == ["bulk0", "bulk1", "bulk2"]
    core.add(request("urgent", tuple(range(90, 98)), 8, priority=PriorityClass.URGENT))
    core.step()
    assert names(core) == ["bulk0", "bulk1", "bulk2", "urgent"]
    finish(core)
    assert core.scheduler.num_preemptions == 0


def test_a_request_may_bring_its_own_chunk_size() -> None:
    """12 tokens of which 4 may run in a step give their first token in the third one."""
    core = core_of(prefill_chunk_size=32)
    core.add(request("r", tuple(range(12)), prefill_chunk=4))
    assert [len(core.step().advanced) for _ in range(3)] == [0, 0, 1]


def test_prefill_beside_running_streams_ends_where_the_step_would_take_too_long() -> None:
    """With 1 ms a token and a target of 10 ms a prompt beside a stream is cut; alone or urgent it is not."""
    core = core_of(num_blocks=64, inter_token_target_seconds=0.01, max_num_seqs=4)
    for size in (8, 16, 24, 32, 12, 20, 28, 9, 30):
        core.scheduler.step_times.observe(StepLoad().plus(0, size), size * 1e-3)
    core.add(request("stream", (1, 2), 30))
    core.step()
    core.add(request("prompt", tuple(range(40, 72)), 2, arrival_seconds=1.0))
    assert 4 <= core.scheduler.schedule(0.0).num_prefill_tokens <= 9
    assert core.scheduler.decisions[Decision.PREFILL_BOUNDED] == 1
    other = core_of(num_blocks=64, inter_token_target_seconds=0.01)
    other.add(request("alone", tuple(range(40, 72)), 2))
    assert other.scheduler.schedule(0.0).num_prefill_tokens == 32


def test_a_hot_device_gets_smaller_steps_and_prompts_with_short_answers_first() -> None:
    """Half the tokens when hot, and the full number again when it has cooled down."""
    config = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96)
    sensor = ScriptedSensor([ThermalReading(90.0), ThermalReading(40.0)])
    now = [0.0]
    governor = ThermalGovernor(sensor, ThermalPolicy())
    core = EngineCore(config, OneTokenRunner(), governor=governor, clock=lambda: now[0], check=True)
    core.add(request("writes", tuple(range(8)), 20))
    core.add(request("reads", tuple(range(20, 52)), 2, arrival_seconds=0.5))
    assert [(r.request_id, len(r.token_ids)) for r in core.scheduler.schedule(0.0).rows] == [("reads", 16)]
    core.scheduler.discard(ScheduledBatch(), "")
    assert core.scheduler.decisions[Decision.HEAT_BOUNDED] == 1
    now[0] = 2.0
    finish(core)
    assert core.scheduler.decisions[Decision.HEAT_BOUNDED] == 1 and core.stats().celsius == 40.0


def test_a_step_that_was_out_of_memory_runs_again_with_half_the_chunks() -> None:
    """Nobody is blamed for it, unless not even a block finds room."""
    core = core_of(num_blocks=64)
    runner = core.runner
    assert isinstance(runner, OneTokenRunner)
    runner.failure = MemoryError()
    core.add(request("long", tuple(range(32)), 2))
    runner.fail_steps = 1
    core.step()
    core.step()
    assert len(runner.batch.rows[0].token_ids) == 16
    finish(core)
    core.add(request("again", tuple(range(40, 72)), 2))
    runner.fail_steps = 100
    result = core.step()
    while not result.errors:
        result = core.step()
    assert set(result.errors) == {"again"} and core.scheduler.decisions[Decision.CHUNK_HALVED] == 1 + 3


def test_an_urgent_request_that_finds_no_room_stops_nobody() -> None:
    """Its blocks are held by another urgent one, which gets its token in every step."""
    core = core_of()
    first = request("first", tuple(range(40)), 40, priority=PriorityClass.URGENT)
    core.add(first)
    core.step()
    core.add(request("urgent", tuple(range(100, 160)), 4, priority=PriorityClass.URGENT))
    core.add(request("bulk", tuple(range(200, 260)), 4, priority=PriorityClass.BULK))
    while core.scheduler.running == [first] and len(first.output_token_ids) < 20:
        before = len(first.output_token_ids)
        core.step()
        assert len(first.output_token_ids) == before + 1
    finish(core)
