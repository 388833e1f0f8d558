"""What a worker tells whoever restarts it, and is told: when it may join, and which prompts another still answers."""

from collections.abc import Collection
from typing import Protocol

from worker.lease import Answered


class Handover(Protocol):
    """The worker calls these, in this order; `answered` any number of times."""

    async def may_join(self) -> Collection[Answered]:
        """The model is loaded. Returns when this worker may join its group, with the prompts that another process is
        still answering: they are left alone until it has said so, or has gone."""

    def serving(self) -> None:
        """Prompts are being taken."""

    def handed_over(self, running: Collection[Answered]) -> None:
        """This worker has left the group and is still answering these."""

    def answered(self, prompt: Answered) -> None:
        """One of them is dealt with."""


class NoHandover:
    """A worker that nobody restarts joins at once."""

    async def may_join(self) -> Collection[Answered]:
        return ()

    def serving(self) -> None:
        pass

    def handed_over(self, running: Collection[Answered]) -> None:
        pass

    def answered(self, prompt: Answered) -> None:
        pass
