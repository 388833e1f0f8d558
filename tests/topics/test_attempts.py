"""The attempt rule under crashes and duplicates, on records made by the real builders."""

from hypothesis import given, settings
from hypothesis import strategies as st

from topics.attempts import AttemptReader, AttemptState, EventKind
from topics.replies import Choice, ReplyContext, ReplyRecord, chunk_record, error_record, final_record, usage_object

PIECES = ["Hel", "lo ", "wor", "ld 🙂", "!"]
ANSWER = "".join(PIECES)


def attempt_records(attempt: str, mode: str, operation: str) -> list[ReplyRecord]:
    ctx = ReplyContext("r1", attempt, operation, "m", 0)
    usage = usage_object(3, 5)
    if mode == "final":
        return [final_record(ctx, 0, choices=[Choice(0, ANSWER, "stop")], usage=usage)]
    last = len(PIECES) - 1
    chunks = [
        chunk_record(
            ctx,
            seq,
            index=0,
            text=piece,
            role_first=seq == 0,
            finish_reason="stop" if seq == last else None,
            usage=usage if seq == last and mode == "chunks" else None,
            final=seq == last and mode == "chunks",
        )
        for seq, piece in enumerate(PIECES)
    ]
    if mode == "both":
        chunks.append(final_record(ctx, len(PIECES), choices=[Choice(0, ANSWER, "stop")], usage=usage))
    return chunks


@settings(max_examples=200, deadline=None)
@given(
    mode=st.sampled_from(["final", "chunks", "both"]),
    operation=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    crashes=st.lists(st.integers(0, 5), max_size=4),
    choices=st.lists(st.integers(0, 4), min_size=40, max_size=40),
    repeats=st.lists(st.booleans(), min_size=80, max_size=80),
)
def test_exactly_one_complete_answer_is_rebuilt_however_attempts_crash_and_interleave(
    mode: str, operation: str, crashes: list[int], choices: list[int], repeats: list[bool]
) -> None:
    """Attempts cut anywhere, interleaved and with repeated records: the text is whole, once, in state and as shown."""
    streams = [attempt_records(f"dead-{i}", mode, operation)[:length] for i, length in enumerate(crashes)]
    streams = [
        stream[:-1] if len(stream) == len(attempt_records("x", mode, operation)) else stream for stream in streams
    ]
    streams.append(attempt_records("good", mode, operation))
    partition: list[ReplyRecord] = []
    for choice, repeat in zip(choices, repeats, strict=False):
        stream = streams[choice % len(streams)]
        if stream:
            partition.append(stream.pop(0))
            partition += [partition[-1]] * repeat
    partition += [record for stream in streams for record in stream]
    reader, shown = AttemptReader(), ""
    for order, (value, headers) in enumerate(partition):
        for event in reader.feed(headers, value, order):
            shown = "" if event.kind is EventKind.SHOW else shown + event.text
    assert (reader.state, reader.attempt, reader.text, shown) == (AttemptState.COMPLETE, "good", ANSWER, ANSWER), reader
    assert reader.usage == usage_object(3, 5)


def test_an_error_record_settles_with_its_code() -> None:
    """The error object is handed over as it came."""
    ctx = ReplyContext("r1", "a", "/v1/chat/completions", "m", 0)
    value, headers = error_record(ctx, 0, code="cancelled", message="cancelled by the client", usage=usage_object(1, 0))
    reader = AttemptReader()
    reader.feed(headers, value, 0)
    assert reader.settled
    assert reader.error == {
        "message": "cancelled by the client",
        "type": "invalid_request_error",
        "code": "cancelled",
        "param": None,
    }


@settings(max_examples=200, deadline=None)
@given(
    headers=st.lists(st.tuples(st.sampled_from(["x-attempt", "x-seq", "x-event", "x-final"]), st.binary(max_size=4))),
    value=st.none()
    | st.binary(max_size=20)
    | st.sampled_from([b"{}", b'{"choices":[1,{"index":0,"delta":[]}]}', b"[]"]),
)
def test_a_reader_survives_any_record(headers: list[tuple[str, bytes]], value: bytes | None) -> None:
    """Foreign records in a reply topic never raise."""
    AttemptReader().feed(headers, value, 0)
