import asyncio
import hashlib
import json

import pytest

from engine.scripted import ScriptedEngine
from topics.headers import ALIASES
from worker.broker.api import MessageTooLargeError, NewTopic, Record, TopicNotAvailableError
from worker.cli import main
from worker.cli.dead_letter import letters, replay
from worker.dead_letter import DIGEST_HEADER, EVERY_TENANT, DeadLetterPolicy, DeadLetters, dead_letter_headers
from worker.letter import NotReplayableError, parse_letter, shown

PROMPT = Record("v4flash.prompts.bulk", 3, 41, 1_700_000_000_000, b"key", b'{"a": 1}', (("x-request-id", b"r"),))


def letter_of(prompt: Record, dialect: str, **changes: object) -> Record:
    headers = dead_letter_headers(prompt, "InvalidMessage", "invalid_json: what", dialect)
    fields = {"value": prompt.value, "headers": headers, **changes}
    return Record("v4flash.dead-letter", 0, 7, 1_700_000_000_500, prompt.key, fields["value"], fields["headers"])


@pytest.mark.parametrize("dialect", ["connect", "spring", "both"])
def test_a_letter_says_in_each_dialect_where_the_prompt_was_and_why_it_is_here(dialect):
    """Connect's text and Spring's binary mean the same."""
    letter = parse_letter(letter_of(PROMPT, dialect))
    assert (letter.topic, letter.partition, letter.offset) == ("v4flash.prompts.bulk", 3, 41)
    assert (letter.reason, letter.message) == ("InvalidMessage", "invalid_json: what")
    assert letter.request_id == "r"


def test_springs_numbers_are_four_and_eight_bytes():
    """What its dead-letter readers unpack."""
    headers = dict(letter_of(PROMPT, "spring").headers)
    assert headers["kafka_dlt-original-partition"] == b"\x00\x00\x00\x03"
    assert headers["kafka_dlt-original-offset"] == b"\x00\x00\x00\x00\x00\x00\x00\x29"
    assert not any(name.startswith("__connect") for name in headers)


@pytest.mark.parametrize("dialect", ["connect", "spring", "both"])
def test_headers_do_not_grow_when_a_replayed_prompt_fails_again(dialect):
    """Reasons of the time before are left out, in whichever dialect they are."""
    once = letter_of(PROMPT, "both")
    topic, key, value, headers = parse_letter(once).replay(keep_deadline=False)
    again = letter_of(Record(topic, 0, 50, 1_700_000_001_000, key, value, headers), dialect)
    names = [name for name, _ in again.headers]
    assert len(names) == len(set(names))
    assert parse_letter(again).offset == 50


def test_a_replay_is_the_prompt_with_its_id_and_without_its_deadline():
    """Client headers survive; the mark of a replay is there once."""
    sent = (("X-TTL-Ms", b"5"), ("x-deadline-ms", b"9"), ("x-replay", b"1"), ("custom", None), ("x-request-id", b"r"))
    prompt = Record("prompts", 1, 2, 3, b"key", b"value", sent)
    letter = parse_letter(letter_of(prompt, "connect"))
    marked = (("custom", None), ("x-request-id", b"r"), ("x-replay", b"1"))
    assert letter.replay(keep_deadline=False) == ("prompts", b"key", b"value", marked)
    assert letter.replay(keep_deadline=True)[3][:2] == sent[:2]


def test_a_prompt_without_an_id_is_replayed_under_the_id_its_replies_had():
    """Topic, partition and offset: its client waits for that one."""
    letter = parse_letter(letter_of(Record("prompts", 1, 2, 3, None, b"value"), "connect"))
    assert ("x-request-id", b"prompts-1-2") in letter.replay(keep_deadline=False)[3]
    assert letter.request_id == "prompts-1-2"


@pytest.mark.parametrize(
    "record",
    [
        Record("dead", 0, 0, 0, None, b"x"),
        letter_of(PROMPT, "connect", headers=(*letter_of(PROMPT, "connect").headers, (DIGEST_HEADER, b"aa"))),
    ],
    ids=["not ours", "digest"],
)
def test_what_cannot_be_sent_again_says_so(record):
    """A stranger's record, and one whose value was not kept."""
    with pytest.raises(NotReplayableError):
        parse_letter(record).replay(keep_deadline=False)


def test_any_record_can_be_shown():
    """Bytes that are no text are hex; the value of a digest is not made up."""
    record = letter_of(PROMPT, "both", value=b"\xff\x00")
    assert json.loads(shown(parse_letter(record)))["value"] == "0xff00"
    assert json.loads(shown(parse_letter(Record("dead", 0, 0, 0, None, None))))["origin"] == "-"


async def test_values_are_kept_or_replaced_by_their_digest_tenant_by_tenant(rig):
    """A tenant's own word, else that of all; the digest says which prompt it was."""
    policy = DeadLetterPolicy("connect", {EVERY_TENANT: "digest", "open": "keep"})
    dead_letters = DeadLetters(rig.producer, rig.names.dead_letter, give_up_seconds=1, policy=policy)
    await dead_letters.write(PROMPT, "InvalidMessage", "why", tenant="open")
    await dead_letters.write(PROMPT, "InvalidMessage", "why", tenant="secret")
    found = {record.value: dict(record.headers) for record in rig.dead_letters()}
    assert DIGEST_HEADER not in found[PROMPT.value]
    assert found[None][DIGEST_HEADER] == hashlib.sha256(PROMPT.value).hexdigest().encode()


async def test_a_value_too_large_for_the_dead_letter_topic_is_replaced_by_its_digest(rig):
    """The headers are kept, so that the client can be found."""
    rig.broker.fail_next("send", MessageTooLargeError("large"), topic=rig.names.dead_letter)
    await DeadLetters(rig.producer, rig.names.dead_letter, give_up_seconds=1).write(PROMPT, "InvalidMessage", "why")
    (record,) = rig.dead_letters()
    assert record.value is None
    assert dict(record.headers)["x-request-id"] == b"r"


async def test_a_mended_prompt_is_answered_after_its_replay(rig, prompt):
    """Refused for the model's name; sent again when a worker serves it, under the id that its client knows."""
    await rig.send(prompt("text", model="new"), x_request_id="r")
    await rig.serve_all()
    (letter,) = [letter async for letter in letters(rig.broker, rig.names.dead_letter)]
    code = await replay(rig.broker, rig.names.dead_letter, {letter.place}, reason=None, keep_deadline=False)
    await rig.serve_all(ScriptedEngine("new"))
    assert code == 0
    assert [reply.headers["x-event"] for reply in rig.replies("r")] == [b"error", b"final"]
    assert await rig.uncommitted() == {}


async def test_a_replay_bypasses_what_is_remembered_of_its_id(rig, prompt):
    """The same worker that answered another body under this id answers the replay too."""
    async with rig.running(rig.app()):
        await rig.send(prompt("one"), x_request_id="r")
        await rig.until_replied("r")
        await rig.send(prompt("two"), x_request_id="r", x_replay="1")
        await rig.until_replied("r", 2)
    assert [reply.headers["x-event"] for reply in rig.replies("r")] == [b"final", b"final"]


async def test_a_replay_of_what_is_not_there_fails_and_sends_the_others(rig, prompt):
    """Exit code 1, the missing one named."""
    await rig.send(prompt("x", max_tokens=0), x_request_id="r")
    await rig.serve_all()
    (letter,) = rig.dead_letters()
    wanted = {f"{letter.partition}:{letter.offset}", "0:999"}
    assert await replay(rig.broker, rig.names.dead_letter, wanted, reason=None, keep_deadline=False) == 1
    assert len(rig.broker.records("v4flash.prompts.standard")) == 2


def test_a_client_cannot_hide_a_deadline_from_a_replay():
    """Both names of a deadline are known to the wire contract."""
    assert {"x-deadline-ms", "x-ttl-ms"} == {*ALIASES["deadline_ms"], *ALIASES["ttl_ms"]}


async def test_a_dead_letter_that_finds_no_place_holds_its_partition_and_nothing_else(rig, prompt, monkeypatch):
    """The topic is gone: the worker lives, says that it is not ready, and commits the prompt once the topic is back."""
    monkeypatch.setattr("worker.dead_letter.AGAIN_SECONDS", 0.01)
    app = rig.app(reply_give_up_seconds=0.05)
    await rig.broker.admin().delete_topics([rig.names.dead_letter])
    async with rig.running(app):
        await rig.send(prompt(max_tokens=0), x_request_id="bad")
        await rig.until_replied("bad")
        await rig.send(prompt(), "urgent", x_request_id="good")
        await rig.until_replied("good")
        assert not app.ready
        await rig.broker.create_topics(NewTopic(rig.names.dead_letter))
        reader = rig.broker.reader([rig.names.dead_letter], from_beginning=True)
        await reader.start()
        assert await reader.poll(1, 5.0)
        await reader.stop()
        await rig.send(prompt(), x_request_id="after")
        await rig.until_replied("after")
        assert app.ready
    assert await rig.uncommitted() == {}


async def test_a_batch_run_ends_with_the_reason_when_its_dead_letter_finds_no_place(rig, prompt):
    """With `--until-end` nobody waits for an operator; the prompt stays uncommitted."""
    await rig.broker.admin().delete_topics([rig.names.dead_letter])
    await rig.send(prompt(max_tokens=0), x_request_id="bad")
    with pytest.raises(ExceptionGroup) as failed:
        await rig.serve_all(reply_give_up_seconds=0.05)
    assert failed.group_contains(TopicNotAvailableError)
    assert await rig.uncommitted() != {}


async def test_the_commands_list_show_and_replay(rig, prompt, capsys, monkeypatch):
    """A line a letter, the whole letter as JSON, a line a replay; a bad place is a word of help."""
    monkeypatch.setattr("worker.cli.dead_letter.command_broker", lambda settings: rig.broker)
    await rig.send(prompt(max_tokens=0), x_request_id="r")
    await rig.serve_all()
    (letter,) = rig.dead_letters()

    async def command(*words: str) -> tuple[int, str]:
        capsys.readouterr()  # what the worker logged before
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, ["dead-letter", *words])
        return ended.value.code or 0, "".join(capsys.readouterr())

    place = f"{letter.partition}:{letter.offset}"
    code, listed = await command("list")
    assert (code, listed.split()[:4:3]) == (0, [place, "r"])
    assert (await command("list", "--reason", "Other"))[1].strip() == "no dead letters"
    assert json.loads((await command("show", place))[1])["request_id"] == "r"
    assert await command("show", "0:999") == (1, "v4flash: there is no dead letter 0:999\n")
    assert await command("show", "first") == (1, "v4flash: first is no PARTITION:OFFSET\n")
    assert (await command("replay"))[0] == 1
    assert (await command("replay", "--all"))[1] == f"{place} sent to v4flash.prompts.standard as r\n"
