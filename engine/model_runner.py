"""The contract of what runs a planned step on a device: plain data in, tokens out."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from engine.batch import Layers, SampledRow, ScheduledBatch
from engine.cache.layer_stream import LayerStream


class ModelRunner(Protocol):
    """Runs a batch in segments, then samples; the batch is plain picklable data. Between two segments of one batch
    another one may run, from its first segment to `collect`."""

    def segments(self, batch: ScheduledBatch) -> Sequence[Layers]:
        """The pieces in which this device runs the batch, in order; a single one where it must not be split."""

    def launch(self, batch: ScheduledBatch, layers: Layers) -> None:
        """Start one segment of the forward pass of all rows. A batch that raised is not asked for again."""

    def sample(self) -> None:
        """Choose a token for every row that asks for one."""

    def collect(self) -> list[SampledRow]:
        """Wait for and return the chosen tokens, in row order."""


@runtime_checkable
class StreamingRunner(ModelRunner, Protocol):
    """One that also runs rows whose oldest blocks are not in the KV memory."""

    def stream_from(self, stream: LayerStream) -> None:
        """Such blocks come from there."""
