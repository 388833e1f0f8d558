"""Request ids seen lately and what they asked, so that one id never means two things."""

import hashlib
from collections import OrderedDict

MAX_REMEMBERED = 100_000


class Identities:
    """Identity is (tenant, request id, body digest). Remembers the youngest `MAX_REMEMBERED` of this process."""

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def conflicts(self, tenant: str, request_id: str, value: bytes) -> bool:
        """Whether the id came before with another body; the same body may run again and says the same."""
        digest = hashlib.sha256(value).digest()
        known = self._digests.setdefault((tenant, request_id), digest)
        self._digests.move_to_end((tenant, request_id))
        if len(self._digests) > MAX_REMEMBERED:
            self._digests.popitem(last=False)
        return known != digest
