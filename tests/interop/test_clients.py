"""Each client sends a prompt in its own dialect and gets its answer in the form it expects, whatever happens."""

import pytest
from clients import CLIENTS
from conversation import Outcome
from stage import SLOW, Stage

from engine.api import ChatMessage
from engine.scripted import ScriptedEngine, scripted_answer

pytestmark = [pytest.mark.kafka, pytest.mark.interop]


def right(question: str) -> Outcome:
    """What the scripted engine says to it."""
    ids = ScriptedEngine().encode_chat([ChatMessage("user", question)])
    return Outcome("answer", scripted_answer(ids, 1024))


@pytest.fixture(scope="session")
def answers(stage: Stage) -> dict[str, tuple[Outcome, Outcome]]:
    """What each client got, and what is right."""
    stage.serve()
    asked = stage.ask_all("tell")
    return {name: (found, right(asked[name])) for name, found in stage.outcomes().items()}


@pytest.fixture(scope="session")
def errors(stage: Stage) -> dict[str, Outcome]:
    stage.serve()
    stage.ask_all("[[error]]")
    return stage.outcomes()


@pytest.fixture(scope="session")
def answers_after_a_kill(stage: Stage) -> dict[str, tuple[Outcome, Outcome]]:
    """The worker is killed while it answers everybody; another one takes over."""
    stage.stop_serving()
    stage.serve(SLOW)
    before = stage.num_replies()
    asked = stage.ask_all("tell [[tokens=60]]")
    stage.until_running(len(asked))
    stage.until_streaming(before)
    stage.kill_worker()
    stage.serve()
    return {name: (found, right(asked[name])) for name, found in stage.outcomes().items()}


@pytest.fixture(scope="session")
def answers_after_a_redelivery(stage: Stage) -> dict[str, tuple[Outcome, Outcome]]:
    """Everything that was answered is answered once more, to clients that are still there; then they ask again."""
    stage.serve()
    first = stage.ask_all("tell once")
    assert stage.outcomes() == {name: right(question) for name, question in first.items()}
    stage.stop_serving()
    before = stage.num_replies()
    stage.rewind()
    stage.serve()
    stage.until_all_done()
    assert (stage.num_replies() - before).total() >= len(first), "nothing was delivered again"
    assert not [name for name, conversation in stage.conversations.items() if not conversation.silent]
    asked = stage.ask_all("tell after")
    return {name: (found, right(asked[name])) for name, found in stage.outcomes().items()}


def test_a_client_gets_its_answer(name, answers):
    """In its own dialect, and as what it takes for an answer."""
    found, expected = answers[name]
    assert found == expected


def test_a_client_is_told_of_an_error(name, errors):
    """In the form in which it expects errors."""
    assert errors[name].kind == "error"
    assert CLIENTS[name].error in errors[name].text


def test_a_client_gets_one_right_answer_from_the_second_attempt(name, answers_after_a_kill):
    """SIGKILL while its answer was being generated: half an answer is never taken for a whole one."""
    found, expected = answers_after_a_kill[name]
    assert found == expected


def test_a_second_answer_to_the_same_prompt_does_not_harm_the_next_one(name, answers_after_a_redelivery):
    """The first answer counted; the late one is dropped, and the client goes on."""
    found, expected = answers_after_a_redelivery[name]
    assert found == expected
