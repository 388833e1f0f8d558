"""Caches whose full blocks are stored in another form than the one computed in: every kernel set reads and writes the
same, on odd sizes, over several steps, and in memory poisoned by NaN."""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels.api import TOLERANCES, AttentionPlan
from kernels.cpu.native import load_native
from kernels.kv import AttentionRows, LayerKV
from kernels.reference.cache import quantise_kv, read_blocks
from kernels.select import KERNELS, select_kernels

REFERENCE = select_kernels("cpu", prefer="reference")
FAST = sorted(set(KERNELS) - {"reference"} - ({"cpu-native"} if isinstance(load_native(), str) else set()))
FORMS = [  # compute dtype, stored dtype
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
NUM_KV_HEADS, GROUP = 2, 3


@dataclass(frozen=True)
class Shape:
    block_size: int = 4
    head_dim: int = 8
    group_size: int = 64


class Sequences:
    """Sequences over blocks in disorder, some of which begin alike, that grow step by step."""

    def __init__(self, lengths: list[int], shape: Shape, *, num_shared: int = 0) -> None:
        self.shape, self.lengths = shape, [0] * len(lengths)
        counts = [-(-n // shape.block_size) for n in lengths]
        order = (torch.randperm(num_shared + sum(counts)) + 1).tolist()  # block 0 belongs to nobody
        prefix, order = order[:num_shared], order[num_shared:]
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        for table, count in zip(self.tables, counts, strict=True):
            own = prefix + [order.pop() for _ in range(max(0, count - num_shared))]
            table[:count] = torch.tensor(own[:count])
        self.num_blocks = num_shared + sum(counts) + 1

    def plan(self, query_lens: dict[int, int]) -> AttentionPlan:
        """A step in which these sequences run so many tokens more."""
        size, angles = self.shape.block_size, torch.randn(sum(query_lens.values()), self.shape.head_dim // 2)
        slots, kv_lens = [], []
        for s, query_len in query_lens.items():
            start, self.lengths[s] = self.lengths[s], self.lengths[s] + query_len
            slots += [int(self.tables[s, p // size]) * size + p % size for p in range(start, self.lengths[s])]
            kv_lens.append(self.lengths[s])
        return AttentionPlan(
            query_starts=[0, *accumulate(query_lens.values())],
            kv_lens=kv_lens,
            block_tables=self.tables[list(query_lens)],
            slots=torch.tensor(slots),
            block_size=size,
            cos=angles.cos(),
            sin=angles.sin(),
            tail_slots=[2 * s + 1 for s in query_lens],
        )


def poisoned(num_blocks: int, num_seqs: int, shape: Shape, compute: torch.dtype, stored: torch.dtype) -> LayerKV:
    """A layer, between two others in memory, whose every number is NaN."""
    heads, dim = (2, NUM_KV_HEADS, shape.block_size), shape.head_dim
    wide = torch.full((num_blocks, 3, *heads, dim), 99 if stored is torch.int8 else float("nan"), dtype=stored)
    scales = None
    if stored is torch.int8:
        groups = -(-dim // shape.group_size)
        scales = torch.full((num_blocks, 3, *heads, groups), float("nan"), dtype=torch.float16)[:, 1]
    tail_heads = (2, NUM_KV_HEADS, shape.block_size - 1, dim)
    tail = torch.full((2 * num_seqs + 1, *tail_heads), float("nan"), dtype=compute)
    return LayerKV(wide[:, 1], scales, tail, shape.group_size)


def assert_near(ours: Tensor, twin: Tensor, op: str, dtype: torch.dtype) -> None:
    assert ours.dtype == twin.dtype == dtype
    assert ours.shape == twin.shape
    assert not ours.isnan().any()
    difference = (ours.float() - twin.float()).abs().max()
    assert difference <= TOLERANCES[op, dtype] * max(1.0, float(twin.float().abs().max()) / 4)


def assert_same_memory(ours: LayerKV, twin: LayerKV, compute: torch.dtype) -> None:
    """Written in the same places; what is stored may differ by a level where the value itself was rounded otherwise."""
    for one, other in ((ours.tail, twin.tail), (ours.scales, twin.scales), (ours.body, twin.body)):
        if one is not None and other is not None and one.is_floating_point():
            assert torch.equal(one.isnan(), other.isnan())
    blocks = torch.arange(len(ours.body))
    ours_read, twin_read = (read_blocks(layer, blocks).nan_to_num(7.0) for layer in (ours, twin))
    level = 1 / 100 if ours.scales is not None else torch.finfo(ours.body.dtype).eps
    largest = float(twin_read.abs().max())
    assert (ours_read - twin_read).abs().max() <= level * largest + TOLERANCES["rotary_write_kv", compute]


def copy_of(layer: LayerKV) -> LayerKV:
    body = torch.empty_strided(layer.body.shape, layer.body.stride(), dtype=layer.body.dtype).copy_(layer.body)
    scales = None
    if layer.scales is not None:
        scales = torch.empty_strided(layer.scales.shape, layer.scales.stride(), dtype=torch.float16).copy_(layer.scales)
    assert layer.tail is not None
    return LayerKV(body, scales, layer.tail.clone(), layer.group_size)


def run_steps(name: str, steps: list[AttentionPlan], layer: LayerKV, compute: torch.dtype) -> None:
    """Each step on both kernel sets from the twin's memory, so that rounding does not add up."""
    kernels, head_dim = select_kernels("cpu", prefer=name), layer.body.shape[-1]
    for plan in steps:
        qkv = torch.randn(len(plan.slots), (GROUP + 2) * NUM_KV_HEADS * head_dim).to(compute)
        ours, twin = copy_of(layer), layer
        our_rows, twin_rows = (k.rotary_write_kv(qkv, None, kv, plan) for k, kv in ((kernels, ours), (REFERENCE, twin)))
        assert_near(our_rows.query, twin_rows.query, "rotary_write_kv", compute)
        assert our_rows.exact is not None
        assert twin_rows.exact is not None
        assert_near(our_rows.exact, twin_rows.exact, "rotary_write_kv", compute)
        assert_same_memory(ours, twin, compute)
        assert_near(
            kernels.attention(twin_rows, twin, plan), REFERENCE.attention(twin_rows, twin, plan), "attention", compute
        )


SHAPES = [
    Shape(),
    Shape(head_dim=64, block_size=16),
    Shape(head_dim=80, block_size=5),
    Shape(head_dim=128, block_size=16),
    Shape(head_dim=40, block_size=7, group_size=16),
    Shape(head_dim=64, block_size=1, group_size=24),
    Shape(head_dim=20, block_size=96, group_size=8),
]
STEPS = [
    {0: 1, 1: 3, 2: 70, 3: 33},
    {0: 1, 2: 1, 3: 1},
    {1: 1, 0: 5, 2: 30},
    {3: 40, 0: 1, 1: 2, 2: 1},
    {0: 3, 1: 1, 2: 2, 3: 1},
]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}".replace("torch.", ""))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_chunks_and_decode_rows_equal_their_twins(
    name: str, form: tuple[torch.dtype, torch.dtype], shape: Shape
) -> None:
    """Blocks that are begun, filled, and left open by chunks and by single rows."""
    torch.manual_seed(0)
    sequences = Sequences([30, 30, 120, 90], shape)
    layer = poisoned(sequences.num_blocks, 4, shape, *form)
    run_steps(name, [sequences.plan(step) for step in STEPS], layer, form[0])


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("form", FORMS[:3], ids=lambda form: f"{form[0]}-{form[1]}".replace("torch.", ""))
@torch.inference_mode()
def test_rows_behind_a_shared_prefix_equal_their_twins(name: str, form: tuple[torch.dtype, torch.dtype]) -> None:
    """What one sequence of a step writes and rounds, the others of that step read as it is stored."""
    torch.manual_seed(1)
    shape = Shape(block_size=4, head_dim=16)
    sequences = Sequences([40] * 6, shape, num_shared=6)
    layer = poisoned(sequences.num_blocks, 6, shape, *form)
    for s in range(1, 6):
        sequences.lengths[s] = 24
    steps = [{0: 26, 1: 3, 2: 5, 3: 1, 4: 1, 5: 4}, dict.fromkeys(range(6), 1), dict.fromkeys(range(6), 3)]
    run_steps(name, [sequences.plan(step) for step in steps], layer, form[0])


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}".replace("torch.", ""))
@torch.inference_mode()
def test_a_row_does_not_depend_on_its_batch_mates(form: tuple[torch.dtype, torch.dtype]) -> None:
    """Each sequence alone gives the very same bits as in the batch, on one thread as on all."""
    torch.manual_seed(5)
    shape, kernels, threads = (
        Shape(head_dim=64, block_size=16),
        select_kernels("cpu", prefer="cpu-native"),
        torch.get_num_threads(),
    )
    sequences = Sequences([30, 30, 120, 90], shape)
    layer = poisoned(sequences.num_blocks, 4, shape, *form)
    for step in STEPS:
        plan = sequences.plan(step)
        qkv = torch.randn(len(plan.slots), (GROUP + 2) * NUM_KV_HEADS * shape.head_dim).to(form[0])
        rows = kernels.rotary_write_kv(qkv, None, layer, plan)
        assert rows.exact is not None
        together, exact_starts = kernels.attention(rows, layer, plan), plan.exact_starts()
        for s, kv_len in enumerate(plan.kv_lens):
            own = slice(plan.query_starts[s], plan.query_starts[s + 1])
            alone = AttentionPlan(
                query_starts=[0, own.stop - own.start],
                kv_lens=[kv_len],
                block_tables=plan.block_tables[s : s + 1],
                slots=plan.slots[own],
                block_size=shape.block_size,
                cos=plan.cos[own],
                sin=plan.sin[own],
                tail_slots=plan.tail_slots[s : s + 1],
            )
            own_rows = AttentionRows(rows.query[own], rows.exact[exact_starts[s] : exact_starts[s + 1]])
            torch.set_num_threads(1)
            try:
                assert torch.equal(kernels.attention(own_rows, layer, alone), together[own])
            finally:
                torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["reference", *FAST])
@pytest.mark.parametrize("form", FORMS[:2], ids=lambda form: f"{form[0]}-{form[1]}".replace("torch.", ""))
@torch.inference_mode()
def test_what_is_read_does_not_depend_on_chunks(name: str, form: tuple[torch.dtype, torch.dtype]) -> None:
    """One chunk, single tokens or odd pieces leave the very same memory, and attention differs by rounding only."""
    kernels = select_kernels("cpu", prefer=name)
    shape, length = Shape(block_size=4, head_dim=16), 27
    results, layers = [], []
    for pieces in ([length], [1] * length, [5, 2, 4, 9, 7]):
        torch.manual_seed(2)
        sequences = Sequences([length], shape)
        layer = poisoned(sequences.num_blocks, 1, shape, *form)
        qkv = torch.randn(length, (GROUP + 2) * NUM_KV_HEADS * shape.head_dim).to(form[0])
        angles = torch.randn(length, shape.head_dim // 2)
        outputs, start = [], 0
        for piece in pieces:
            plan = sequences.plan({0: piece})
            plan = AttentionPlan(
                **{part: getattr(plan, part) for part in ("query_starts", "kv_lens", "block_tables", "slots")},
                block_size=4,
                cos=angles[start : start + piece].cos(),
                sin=angles[start : start + piece].sin(),
                tail_slots=[1],
            )
            rows = kernels.rotary_write_kv(qkv[start : start + piece], None, layer, plan)
            outputs.append(kernels.attention(rows, layer, plan))
            start += piece
        results.append(torch.cat(outputs))
        layers.append(layer)
    for result, layer in zip(results[1:], layers[1:], strict=True):
        assert torch.equal(layer.body, layers[0].body)
        assert layer.scales is not None
        assert layers[0].scales is not None
        assert torch.equal(layer.scales.nan_to_num(7.0), layers[0].scales.nan_to_num(7.0))
        assert_near(result, results[0], "attention", form[0])


@pytest.mark.parametrize("name", ["reference", *FAST])
@torch.inference_mode()
def test_the_own_block_is_read_in_compute_dtype_and_those_before_as_stored(name: str) -> None:
    """A stored block that says something else than what was written changes later blocks' rows and none of its own."""
    torch.manual_seed(3)
    kernels = select_kernels("cpu", prefer=name)
    shape = Shape(block_size=4, head_dim=16)
    sequences = Sequences([12], shape)
    layer = poisoned(sequences.num_blocks, 1, shape, torch.float32, torch.int8)
    plan = sequences.plan({0: 12})
    rows = kernels.rotary_write_kv(torch.randn(12, (GROUP + 2) * NUM_KV_HEADS * 16), None, layer, plan)
    before = kernels.attention(rows, layer, plan)
    layer.body[plan.block_tables[0, 1]] += 20
    after = kernels.attention(rows, layer, plan)
    assert torch.equal(before[:8], after[:8])
    assert ((before[8:] - after[8:]).flatten(1).abs().amax(1) > 1e-3).all()
    with_own = AttentionRows(rows.query, rows.exact.clone().index_fill_(0, torch.tensor([4]), 3.0))  # type: ignore[union-attr]
    changed = (kernels.attention(with_own, layer, plan) - after).flatten(1).abs().amax(1) > 0
    assert changed.tolist() == [False] * 4 + [True] * 4 + [False] * 4


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [Shape(64, 64), Shape(48, 40, group_size=16)], ids=str)
@torch.inference_mode()
def test_codes_are_to_the_bit_those_of_a_division(name: str, compute: torch.dtype, shape: Shape) -> None:
    """Also where a value lies in the middle of two codes, for scales of all sizes."""
    torch.manual_seed(15)
    size, dim = shape.block_size, shape.head_dim
    layer = poisoned(2, 1, shape, compute, torch.int8)
    plan = Sequences([size], shape).plan({0: size})
    plan = replace(plan, cos=torch.ones_like(plan.cos), sin=torch.zeros_like(plan.sin))
    scale = torch.logspace(-6, 2, size).half().float()[:, None]
    middles = (torch.randint(-126, 126, (size, (GROUP + 2) * NUM_KV_HEADS * dim)) + 0.5) * scale
    middles[:, :: shape.group_size // 2] = 127 * scale  # so that it is the scale of every group
    qkv = middles.to(compute)
    exact = select_kernels("cpu", prefer=name).rotary_write_kv(qkv, None, layer, plan).exact
    assert exact is not None
    codes, scales = quantise_kv(exact.permute(1, 2, 0, 3), shape.group_size)
    block = plan.block_tables[0, 0]
    assert torch.equal(layer.body[block], codes)
    assert layer.scales is not None
    assert torch.equal(layer.scales[block], scales)
    if compute is torch.float32:
        quotients = exact[:, 0, 0, 1] / scale[:, 0]
        assert (quotients % 1 == 0.5).all(), "no value lies in a middle: the test shows nothing"


def test_int8_is_exact_at_zero_and_off_by_half_a_level_at_most() -> None:
    """For rows of every size that float32 holds, the largest and the smallest included."""
    torch.manual_seed(4)
    x = torch.randn(500, 64) * torch.logspace(-38, 6.2, 500)[:, None]
    x[0], x[1, ::2] = 0, 0
    codes, scales = quantise_kv(x, 24)
    assert scales.shape == (500, 3)
    widened = scales.float().repeat_interleave(24, 1)[:, :64]
    read = codes.float() * widened
    assert (read[x == 0] == 0).all()
    assert ((read - x).abs() <= widened / 2 * (1 + 1e-6)).all()
    huge, _ = quantise_kv(torch.full((1, 64), 3e38), 64)
    assert (huge == 127).all()
