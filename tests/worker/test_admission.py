from worker.admission import GATHER_SECONDS, Admission, AdmissionPolicy, Held
from worker.broker.api import Record, TopicPartition
from worker.commit_metadata import CommitMetadata, Mark, MarkState
from worker.lease import Answered, AnsweredBook, done_record, parse_done
from worker.offsets import OffsetTracker
from worker.partition_state import PartitionStart

TP = TopicPartition("prompts", 0)
LATER = GATHER_SECONDS + 1


def record(offset: int) -> Record:
    return Record(*TP, offset, 1000 + offset, None, b"{}")


def admission(metadata: CommitMetadata, *offsets: int) -> tuple[Admission, OffsetTracker]:
    """All of `offsets` have come; those of `metadata` were left by former owners."""
    tracker = OffsetTracker(max_inflight_per_partition=32)
    tracker.assign({TP: PartitionStart(0, metadata, 100)})
    made = Admission(tracker, AdmissionPolicy(alone_after=2, quarantine_after=3, lease_seconds=60), AnsweredBook())
    made.assigned(0.0)
    for offset in offsets:
        assert tracker.arrived(TP, offset)
        made.arrived(Held(record(offset), 0))
    return made, tracker


def starts(made: Admission, *, num_running: int = 0, now: float = LATER, wall_ms: int = 0) -> list[tuple[int, str]]:
    return [
        (start.held.record.offset, "quarantined" if start.quarantined else "alone" if start.alone else "together")
        for start in made.start(num_running=num_running, now=now, wall_ms=wall_ms)
    ]


def marked(**deaths: int) -> CommitMetadata:
    """`o3=1`: offset 3 was with two vanished owners, one of which died while it ran alone."""
    return CommitMetadata(marks={int(at[1:]): Mark(MarkState.WAITING, num, 2) for at, num in deaths.items()})


def test_without_marks_and_leases_everything_starts():
    """In the order in which it came."""
    assert starts(admission(CommitMetadata(), 0, 1, 2)[0], num_running=5) == [
        (0, "together"),
        (1, "together"),
        (2, "together"),
    ]


def test_a_suspect_waits_for_the_others_to_end_and_has_no_company():
    """The one with the fewest deaths is first; the rest follows when none is left."""
    made, tracker = admission(marked(o1=2, o2=0), 0, 1, 2)
    assert starts(made, num_running=1) == []
    assert starts(made) == [(2, "alone")]
    tracker.started(TP, 2, alone=True)
    assert starts(made, num_running=1) == []
    tracker.finished(TP, 2)
    assert starts(made) == [(1, "alone")]
    tracker.started(TP, 1, alone=True)
    assert starts(made, num_running=1) == [], "the last suspect has no company either"
    tracker.finished(TP, 1)
    assert starts(made) == [(0, "together")]


def test_one_vanished_owner_makes_no_suspect():
    """A worker that is killed once costs nobody a slot."""
    together = CommitMetadata(marks={0: Mark(MarkState.TOGETHER), 1: Mark(MarkState.TOGETHER)})
    assert starts(admission(together, 0, 1)[0]) == [(0, "together"), (1, "together")]


def test_nothing_starts_beside_a_suspect_that_is_still_to_come_but_it_is_not_waited_for_for_ever():
    """It may have been compacted away."""
    made, _ = admission(marked(o9=0), 0)
    assert starts(made, now=GATHER_SECONDS / 2) == []
    assert starts(made, now=LATER) == [(0, "together")]


def test_a_prompt_with_all_its_deaths_is_quarantined_at_once():
    """It is not run, so it may go beside whatever runs."""
    assert starts(admission(marked(o0=3, o1=0), 0, 1)[0], num_running=4) == [(0, "quarantined")]


def test_a_leased_prompt_starts_when_the_lease_is_over():
    """At its time, or after our own longest lease if it names an absurd one."""
    made, _ = admission(CommitMetadata(leases={0: 500, 1: 1 << 42}), 0, 1)
    assert starts(made, wall_ms=499) == []
    assert starts(made, wall_ms=500) == [(0, "together")]
    assert starts(made, wall_ms=60_000) == [(1, "together")]


def test_the_word_of_a_former_owner_counts_for_its_own_record_only():
    """Another time stamp is another log's prompt; a prompt that is not leased is not dropped."""
    made, tracker = admission(CommitMetadata(leases={0: 500}), 0, 1)
    assert not made.answered(Answered(TP, 0, 999))
    assert not made.answered(Answered(TP, 1, 1001))
    assert made.answered(Answered(TP, 0, 1000))
    assert tracker.watermark(TP) == 1
    assert starts(made, wall_ms=0) == [(1, "together")]


def test_the_word_survives_the_wire_and_nothing_else_is_taken_for_it():
    """Cancels, other JSON and no JSON are no word."""
    key, value = done_record(record(7))
    assert parse_done(Record("control", 0, 0, 0, key, value)) == Answered(TP, 7, 1007)
    for other in (None, b"", b"[]", b"{", b'{"type":"cancel"}', value.replace(b"7", b'"7"', 1), b'{"type":"done"}'):
        assert parse_done(Record("control", 0, 0, 0, key, other)) is None
