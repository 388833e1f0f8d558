"""When a block that was written or found is worth a place on the SSD."""

from enum import StrEnum

ROOM_SHARE = 0.5


class ColdAdmission(StrEnum):
    """FIRST: at once. SECOND: when it is seen for the second time. ROOM: at once while at most `ROOM_SHARE` of the tier
    is taken, at the second time beyond: filling room wears a disk once, admitting everything wears it day by day."""

    FIRST = "first"
    SECOND = "second"
    ROOM = "room"

    def waits(self, taken_bytes: int, capacity_bytes: int) -> bool:
        """Whether a block that was never seen before has to be seen again first."""
        if self is ColdAdmission.ROOM:
            return taken_bytes > ROOM_SHARE * capacity_bytes
        return self is ColdAdmission.SECOND
