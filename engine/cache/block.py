"""One block of KV cache and its identity: the hash names its tokens, all tokens before, and who may share it."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

BlockHash = bytes


class BlockState(Enum):
    """FREE holds nothing; PENDING is being written by the step in flight; COMMITTED may be shared by everyone."""

    FREE = "free"
    PRIVATE = "private"
    PENDING = "pending"
    COMMITTED = "committed"


@dataclass(slots=True)
class Block:
    """A block of the pool: its number is its place in the cache tensor. `loaded` ones came from a colder tier and were
    not used since."""

    block_id: int
    state: BlockState = BlockState.FREE
    num_refs: int = 0
    block_hash: BlockHash | None = None
    loaded: bool = False


def root_hash(*, tenant: str, model_digest: str, layout_id: str) -> BlockHash:
    """Parent of every first block: two prompts share blocks only if all three fields are equal."""
    digest = hashlib.sha256(b"v4flash-kv-1")
    for field in (tenant, model_digest, layout_id):
        raw = field.encode()
        digest.update(struct.pack("<I", len(raw)))
        digest.update(raw)
    return digest.digest()


def child_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """SHA-256 over the parent and the framed token ids of one full block."""
    return hashlib.sha256(parent + struct.pack(f"<I{len(token_ids)}I", len(token_ids), *token_ids)).digest()


def hash_chain(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`, first to last."""
    hashes, parent = [], root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = child_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
