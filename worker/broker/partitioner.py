"""Which partition a key belongs to: murmur2, as Kafka's Java client and aiokafka compute it."""

_MASK = 0xFFFFFFFF
_M = 0x5BD1E995
_SEED = 0x9747B28C


def murmur2(data: bytes) -> int:
    """The 32-bit murmur2 hash of `data`, unsigned, with the seed of Kafka's clients."""
    h = (_SEED ^ len(data)) & _MASK
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        k = int.from_bytes(data[start : start + 4], "little") * _M & _MASK
        k = (k ^ (k >> 24)) * _M & _MASK
        h = (h * _M & _MASK) ^ k
    if tail := data[whole:]:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h = (h ^ (h >> 13)) * _M & _MASK
    return h ^ (h >> 15)


def partition_for(key: bytes, num_partitions: int) -> int:
    """The partition of `key`, the same for every client that keeps Kafka's default partitioner."""
    return (murmur2(key) & 0x7FFFFFFF) % num_partitions
