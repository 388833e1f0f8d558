"""Which blocks may be found again, by whom, and which go first."""

import pytest

from engine.cache.block import BlockHash, child_hash, hash_chain, root_hash
from engine.cache.manager import KVCacheManager
from engine.cache.pool import BlockPool
from engine.request import Request
from engine.sampling_params import SamplingParams

FIELDS = {"tenant": "a", "model_digest": "m", "layout_id": "l"}
TOKENS = tuple(range(12))


@pytest.mark.parametrize("field", list(FIELDS))
def test_every_field_of_the_root_makes_another_identity(field: str) -> None:
    """A block of another tenant, model or layout is never found: the whole chain differs."""
    ours = hash_chain(root_hash(**FIELDS), TOKENS, 4)
    theirs = hash_chain(root_hash(**{**FIELDS, field: "other"}), TOKENS, 4)
    assert len(ours) == 3 and not set(ours) & set(theirs)


def test_fields_and_tokens_are_framed() -> None:
    """No two different inputs give the same bytes to hash; a block's hash names all tokens before it."""
    assert root_hash(tenant="ab", model_digest="c", layout_id="") != root_hash(
        tenant="a", model_digest="bc", layout_id=""
    )
    root = root_hash(**FIELDS)
    assert hash_chain(root, (1, 2, 3, 4, 9, 9, 9, 9), 4)[1] != hash_chain(root, (1, 2, 3, 5, 9, 9, 9, 9), 4)[1]
    assert child_hash(root, (1, 2)) != child_hash(root, (2, 1))


def request(root: BlockHash, tokens: tuple[int, ...] = TOKENS) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=4), root)


def test_a_prefix_is_shared_within_a_tenant_only() -> None:
    """The same prompt of another tenant starts from nothing."""
    cache = KVCacheManager(16, 4)
    writer = request(root_hash(**FIELDS))
    assert cache.allocate(writer, 12)
    cache.commit_step()
    assert cache.attach_prefix(request(root_hash(**FIELDS))) == 8
    assert cache.attach_prefix(request(root_hash(**{**FIELDS, "tenant": "b"}))) == 0


def test_what_a_failed_step_wrote_is_never_found() -> None:
    """Its blocks hold anything."""
    cache = KVCacheManager(16, 4)
    writer = request(root_hash(**FIELDS))
    assert cache.allocate(writer, 12)
    cache.discard_step()
    assert cache.attach_prefix(request(root_hash(**FIELDS))) == 0
    cache.release(writer)
    cache.check()
    assert cache.pool.num_cached == 0


def filled(pool: BlockPool, names: str) -> None:
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for block, name in zip(blocks, names, strict=True):
        assert pool.publish(block, name.encode())
        pool.commit(block)
    pool.release(blocks)


def cached(pool: BlockPool, names: str) -> str:
    return "".join(name for name in names if pool.find(name.encode()) is not None)


def test_eviction_takes_the_leaf_first_and_the_least_recently_used_chain() -> None:
    """A prefix outlives what follows it, and what was used lately outlives what was not."""
    pool = BlockPool(4)
    filled(pool, "abcd")
    held = pool.allocate(1)
    assert cached(pool, "abcd") == "abc" and held is not None
    pool.release(held)
    pool = BlockPool(2)
    filled(pool, "a")
    filled(pool, "b")
    assert pool.allocate(1) is not None
    assert cached(pool, "ab") == "b"
    pool.check()
