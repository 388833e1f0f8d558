"""Load a block or compute it again: the cheaper one, by what was measured. Knows no file and no tensor."""

from dataclasses import dataclass, field
from enum import StrEnum

FLOOR_SECONDS = 0.015
DEADLINE_FACTOR = 3.0
_WEIGHT = 0.2


class GateDecision(StrEnum):
    """What was decided for a request whose prefix lies on the SSD: OFF while the disk hangs, SHORTAGE without room."""

    LOAD = "load"
    RECOMPUTE = "recompute"
    SHORTAGE = "shortage"
    OFF = "off"


@dataclass(slots=True)
class TransferCost:
    """Moving averages of one block's read and of one token's prefill; a probe at start gives the first of each.
    Without its gate it always loads."""

    num_readers: int = 1
    has_gate: bool = True
    block_seconds: float = 0.0
    token_seconds: float = 0.0
    decisions: dict[GateDecision, int] = field(default_factory=lambda: dict.fromkeys(GateDecision, 0))

    def observe_read(self, seconds: float) -> None:
        """A block took this long to read beside the others in flight. A read that is late is a sample as well."""
        self.block_seconds = _moved(self.block_seconds, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self.token_seconds = _moved(self.token_seconds, seconds / num_tokens)

    def load_seconds(self, num_blocks: int, *, num_ahead: int = 0) -> float:
        """Predicted time until `num_blocks` have come, after the `num_ahead` that are on their way already."""
        return -(-(num_blocks + num_ahead) // self.num_readers) * self.block_seconds

    def deadline_seconds(self, num_blocks: int, *, num_ahead: int = 0) -> float:
        """How long a load may take before it is a miss."""
        return max(FLOOR_SECONDS, DEADLINE_FACTOR * self.load_seconds(num_blocks, num_ahead=num_ahead))

    def is_cheaper(self, num_blocks: int, num_tokens: int, *, num_ahead: int = 0) -> bool:
        """Whether loading `num_blocks` is predicted to beat computing their `num_tokens`."""
        if not self.has_gate:
            return True
        return self.load_seconds(num_blocks, num_ahead=num_ahead) < num_tokens * self.token_seconds

    def decide(self, decision: GateDecision) -> None:
        self.decisions[decision] += 1


def _moved(average: float, sample: float) -> float:
    """The first sample is taken as it is; one that is far above counts half, since each costs somebody a deadline."""
    if not average:
        return sample
    return average + (0.5 if sample > 4 * average else _WEIGHT) * (sample - average)
