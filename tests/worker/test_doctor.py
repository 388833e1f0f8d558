"""What is said of a cluster, from facts alone."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from topics.names import TopicNames
from topics.routes import Route
from worker.cli import main
from worker.doctor import ClusterFacts, Right, Role, Severity, findings, needed_rights
from worker.settings import Settings

NAMES = TopicNames()
SETTINGS = Settings(max_body_bytes=1000)
GOOD = {"max.message.bytes": "100000", "message.timestamp.type": "LogAppendTime", "retention.ms": "604800000"}
TOPICS = [*NAMES.all_prompts, NAMES.replies, NAMES.dead_letter, NAMES.control]
HEALTHY = ClusterFacts(
    partition_counts=dict.fromkeys(TOPICS, 12),
    topic_configs=dict.fromkeys(TOPICS, GOOD) | {NAMES.control: {**GOOD, "cleanup.policy": "compact,delete"}},
    broker_config={"auto.create.topics.enable": "false", "offsets.retention.minutes": "10080"},
    rights=dict.fromkeys(needed_rights(SETTINGS, dict.fromkeys(TOPICS, 12), Role.WORKER), True),
)


def changed(topic: str, **config: str) -> ClusterFacts:
    configs: Mapping[str, Mapping[str, str]] = {
        **HEALTHY.topic_configs,
        topic: {**HEALTHY.topic_configs[topic], **{name.replace("_", "."): value for name, value in config.items()}},
    }
    return replace(HEALTHY, topic_configs=configs)


SICK = {
    "without a topic": (
        replace(HEALTHY, partition_counts={t: 12 for t in TOPICS if t != NAMES.dead_letter}),
        Severity.FAILED,
        "v4flash.dead-letter is not there",
    ),
    "unequal counts": (
        replace(HEALTHY, partition_counts={**HEALTHY.partition_counts, NAMES.prompts("bulk"): 3}),
        Severity.FAILED,
        "v4flash.prompts.bulk has 3",
    ),
    "a right that is missing": (
        replace(HEALTHY, rights={Right("write", NAMES.replies): False}),
        Severity.FAILED,
        "v4flash.replies write: no ACL",
    ),
    "compacted prompts": (changed(NAMES.prompts("bulk"), cleanup_policy="compact"), Severity.FAILED, "drops a prompt"),
    "small records": (changed(NAMES.replies, max_message_bytes="1000"), Severity.WARNING, "max.message.bytes 1000"),
    "client's clock": (
        changed(NAMES.prompts("bulk"), message_timestamp_type="CreateTime"),
        Severity.WARNING,
        "a client's clock decides",
    ),
    "short retention": (changed(NAMES.prompts("bulk"), retention_ms="60000"), Severity.WARNING, "vanish unanswered"),
    "cancels forgotten": (changed(NAMES.control, retention_ms="1000"), Severity.WARNING, "keeps cancels for a shorter"),
    "prompts for ever": (changed(NAMES.prompts("bulk"), retention_ms="-1"), Severity.WARNING, "keeps cancels"),
    "auto-create": (
        replace(HEALTHY, broker_config={"auto.create.topics.enable": "true"}),
        Severity.WARNING,
        "auto.create.topics.enable",
    ),
    "short memory of offsets": (
        replace(HEALTHY, broker_config={"offsets.retention.minutes": "60"}),
        Severity.WARNING,
        "nobody knows what is answered",
    ),
    "no right to look": (replace(HEALTHY, broker_config={}), Severity.UNKNOWN, "may not be seen"),
}


def test_nothing_is_said_against_a_healthy_cluster() -> None:
    """As `topics create` makes it."""
    assert {finding.severity for finding in findings(SETTINGS, HEALTHY, Role.WORKER)} == {Severity.OK}


@pytest.mark.parametrize("facts, severity, said", SICK.values(), ids=SICK.keys())
def test_each_fault_is_found_and_named(facts: ClusterFacts, severity: Severity, said: str) -> None:
    """One finding that is not ok, with the topic or setting to mend."""
    bad = [finding for finding in findings(SETTINGS, facts, Role.WORKER) if finding.severity is not Severity.OK]
    assert [finding.severity for finding in bad] == [severity]
    assert said in f"{bad[0].subject} {bad[0].said}"


def test_a_cluster_out_of_reach_is_the_only_finding() -> None:
    """No list of topics that are missing only because nobody answers; one of two addresses is a warning."""
    refused = {"127.0.0.1:9092": "Connection refused"}
    assert [f.severity for f in findings(SETTINGS, ClusterFacts(refused), Role.WORKER)] == [Severity.FAILED]
    two = Settings(max_body_bytes=1000, bootstrap_servers="127.0.0.1:9092,other:9092")
    found = findings(two, replace(HEALTHY, refused=refused), Role.WORKER)
    assert [f.severity for f in found if f.severity is not Severity.OK] == [Severity.WARNING]


def test_rights_follow_the_routes() -> None:
    """Topics of a pattern, and an output topic instead of the shared one; a client needs the opposite rights."""
    settings = Settings(routes=(Route(pattern="jobs-[a-z]+", output_topic="answers"),))
    existing = {"jobs-a": 1, "answers": 1, "other": 1, NAMES.replies: 1}
    assert needed_rights(settings, existing, Role.CLIENT) == [Right("write", "jobs-a"), Right("read", "answers")]
    assert needed_rights(settings, existing, Role.WORKER) == [
        Right("read", "jobs-a"),
        Right("write", "answers"),
        Right("join", "v4flash"),
    ]


def test_the_command_fails_and_says_why_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for the address, and an exit code for scripts."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "kafka", "--bootstrap-servers", "127.0.0.1:1"])
    assert ended.value.code == 1
    told = capsys.readouterr().out
    assert told.startswith("FAILED  127.0.0.1:1")
    assert "1 checks, 1 failed" in told
