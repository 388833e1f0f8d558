"""What the engine's steps leave in the flight recorder."""

import pytest

from engine.flight import FlightRecorder


def test_a_recorder_forgets_the_oldest_and_gives_copies() -> None:
    """A reader on another thread sees whole events, and changes nothing."""
    flight = FlightRecorder(max_events=2)
    event = flight.record("step", 1.0, seconds=None)
    flight.record("step", 2.0)
    event["seconds"] = 0.5
    copied = flight.events()
    assert copied[0] == {"at": 1.0, "kind": "step", "seconds": 0.5}
    copied[0]["seconds"] = 9
    assert flight.events()[0]["seconds"] == pytest.approx(0.5)
    flight.record("step", 3.0)
    assert [event["at"] for event in flight.events()] == [2.0, 3.0]
