"""What a cluster lacks for a worker, or for a client of it, to do its work. A pure decision over facts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from worker.provision import RECORD_OVERHEAD_BYTES
from worker.settings import Settings

FOREVER = "-1"
DAY_MINUTES = 24 * 60


class Severity(StrEnum):
    """FAILED: prompts will be lost, refused or not answered. WARNING: some will, in some cases. UNKNOWN: no right to
    look."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    FAILED = "FAILED"


class Finding(NamedTuple):
    """What was looked at, and what is to be said of it."""

    severity: Severity
    subject: str
    said: str


class Role(StrEnum):
    """Whose rights are checked."""

    WORKER = "worker"
    CLIENT = "client"


class Right(NamedTuple):
    """`kind` is read, write (of a topic) or join (of a group)."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What a principal sees. Configurations that it may not see are absent."""

    refused: Mapping[str, str] = field(default_factory=dict)
    partition_counts: Mapping[str, int] = field(default_factory=dict)
    topic_configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    broker_config: Mapping[str, str] = field(default_factory=dict)
    rights: Mapping[Right, bool] = field(default_factory=dict)


def prompt_topics(settings: Settings, existing: Mapping[str, int]) -> list[str]:
    """Named in a route, or matched by one."""
    routes = settings.route_table
    return sorted(routes.topics | {topic for topic in existing if routes.match(topic) is not None})


def reply_topics(settings: Settings) -> list[str]:
    """Those that the worker writes to by itself."""
    routes = settings.route_table.routes
    shared = any(route.output_topic is None for route in routes)
    outputs = {route.output_topic for route in routes if route.output_topic is not None}
    return sorted(outputs | ({settings.names.replies} if shared else set()))


def needed_rights(settings: Settings, existing: Mapping[str, int], role: Role) -> list[Right]:
    """What the role does with topics that exist, and with the group."""
    prompts, replies, names = prompt_topics(settings, existing), reply_topics(settings), settings.names
    if role is Role.CLIENT:
        wanted = [Right("write", topic) for topic in prompts] + [Right("read", topic) for topic in replies]
    else:
        wanted = [Right("read", topic) for topic in (*prompts, names.control)]
        wanted += [Right("write", topic) for topic in (*replies, names.control, names.dead_letter)]
    wanted = [right for right in wanted if right.name in existing]
    return [*wanted, Right("join", settings.group_id)] if role is Role.WORKER else wanted


def findings(settings: Settings, facts: ClusterFacts, role: Role) -> list[Finding]:
    """Everything worth a line, in the order in which one would mend it."""
    found = list(_addresses(settings, facts))
    if len(facts.refused) == len(settings.bootstrap_servers.split(",")):
        return found
    needed = [*prompt_topics(settings, facts.partition_counts), *reply_topics(settings)]
    if role is Role.WORKER:
        needed += [settings.names.control, settings.names.dead_letter]
    found += _topics(needed, facts)
    found += _equal_counts(settings, facts)
    for right, given in facts.rights.items():
        said = f"{right.kind}: allowed" if given else f"{right.kind}: no ACL allows it (ops/security.md)"
        found.append(Finding(Severity.OK if given else Severity.FAILED, right.name, said))
    for topic in needed:
        if topic in facts.partition_counts:
            found += list(_config(topic, settings, facts)) or [Finding(Severity.OK, topic, "its settings fit")]
    found += list(_broker(facts)) or [Finding(Severity.OK, "cluster", "its settings fit")]
    return found


def _addresses(settings: Settings, facts: ClusterFacts) -> Iterator[Finding]:
    addresses = [address.strip() for address in settings.bootstrap_servers.split(",")]
    lost = len(facts.refused) == len(addresses)
    for address in addresses:
        if address in facts.refused:
            yield Finding(Severity.FAILED if lost else Severity.WARNING, address, facts.refused[address])
        else:
            yield Finding(Severity.OK, address, f"answers ({settings.security_protocol})")


def _topics(needed: list[str], facts: ClusterFacts) -> Iterator[Finding]:
    for topic in needed:
        count = facts.partition_counts.get(topic)
        if count is None:
            yield Finding(Severity.FAILED, topic, "is not there, or no ACL lets us see it (`v4flash topics create`)")
        else:
            yield Finding(Severity.OK, topic, f"{count} partition{'s' if count > 1 else ''}")


def _equal_counts(settings: Settings, facts: ClusterFacts) -> Iterator[Finding]:
    prompts = [topic for topic in prompt_topics(settings, facts.partition_counts) if topic in facts.partition_counts]
    counts = {topic: facts.partition_counts[topic] for topic in prompts}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{topic} has {count}" for topic, count in counts.items())
        yield Finding(
            Severity.FAILED, "partition counts", f"must be equal for every worker to hold every class: {said}"
        )


def _config(topic: str, settings: Settings, facts: ClusterFacts) -> Iterator[Finding]:
    config = facts.topic_configs.get(topic)
    if config is None:
        yield Finding(Severity.UNKNOWN, topic, "its settings may not be seen (DescribeConfigs)")
        return
    limit, wanted = int(config.get("max.message.bytes", "0")), settings.max_body_bytes + RECORD_OVERHEAD_BYTES
    if limit < wanted:
        yield Finding(
            Severity.WARNING, topic, f"max.message.bytes {limit} is below max_body_bytes and headers ({wanted})"
        )
    prompts = prompt_topics(settings, facts.partition_counts)
    if topic in prompts:
        yield from _prompt_config(topic, config, settings)
    if topic == settings.names.control:
        yield from _control_config(topic, config, [facts.topic_configs.get(name, {}) for name in prompts])


def _prompt_config(topic: str, config: Mapping[str, str], settings: Settings) -> Iterator[Finding]:
    if "compact" in config.get("cleanup.policy", "delete"):
        yield Finding(Severity.FAILED, topic, "cleanup.policy compact drops a prompt when the next one has its key")
    if config.get("message.timestamp.type") != "LogAppendTime":
        yield Finding(Severity.WARNING, topic, "without message.timestamp.type LogAppendTime a client's clock decides")
    retention = config.get("retention.ms", FOREVER)
    wanted = int(settings.max_replay_age_seconds * 1000)
    if retention != FOREVER and int(retention) < wanted:
        said = f"retention.ms {retention} is below max_replay_age_seconds ({wanted} ms): late prompts vanish unanswered"
        yield Finding(Severity.WARNING, topic, said)


def _control_config(topic: str, config: Mapping[str, str], prompts: list[Mapping[str, str]]) -> Iterator[Finding]:
    if "compact" not in config.get("cleanup.policy", "delete"):
        yield Finding(Severity.WARNING, topic, "without cleanup.policy compact every start reads all of it")
    mine = config.get("retention.ms", FOREVER)
    longest = [prompt.get("retention.ms", FOREVER) for prompt in prompts]
    shorter = FOREVER in longest or any(int(mine) < int(other) for other in longest)
    if "delete" in config.get("cleanup.policy", "delete") and mine != FOREVER and shorter:
        yield Finding(Severity.WARNING, topic, "keeps cancels for a shorter time than the prompt topics keep prompts")


def _broker(facts: ClusterFacts) -> Iterator[Finding]:
    if not facts.broker_config:
        yield Finding(Severity.UNKNOWN, "cluster", "its settings may not be seen (DescribeConfigs on the cluster)")
        return
    if facts.broker_config.get("auto.create.topics.enable") == "true":
        said = "auto.create.topics.enable makes a deleted reply topic again whenever somebody looks for it"
        yield Finding(Severity.WARNING, "cluster", said)
    kept = int(facts.broker_config.get("offsets.retention.minutes", DAY_MINUTES))
    if kept < DAY_MINUTES:
        said = f"offsets.retention.minutes {kept}: after so long without workers nobody knows what is answered"
        yield Finding(Severity.WARNING, "cluster", said)
