"""A real Kafka that asks who is there and allows what `ops/security.md` says: every mechanism, and every role."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest
from secured import SecuredKafka, password_of, unsigned_token

from engine.scripted import ScriptedEngine
from topics.names import TopicNames
from worker.app import WorkerApp
from worker.broker.api import BrokerError, BrokerUnavailableError, NewTopic, TopicNotAvailableError, TopicPartition
from worker.broker.kafka import KafkaBroker
from worker.cli.doctor import facts_of
from worker.client import Answer, Client, Prompt, RequestFailedError
from worker.clock import SystemClock
from worker.doctor import Role, Severity, findings
from worker.provision import create_topics, topics_of
from worker.serve import build_broker
from worker.settings import Settings

PAGE = Path(__file__).parents[2] / "ops" / "security.md"
NAMES = TopicNames()
RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
PATTERNS = {"literal": 3, "prefixed": 4}
OPERATIONS = {
    "All": 2,
    "Read": 3,
    "Write": 4,
    "Create": 5,
    "Delete": 6,
    "Describe": 8,
    "DescribeConfigs": 10,
}
ALLOW = 3

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


def acls() -> list[list[str]]:
    """The rows of the page's table: role, resource, name, pattern, operations."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    return [row for row in rows if len(row) == 5 and row[1] in RESOURCES]


async def allow(bootstrap_servers: str) -> None:
    """Make the ACLs of the page."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    for role, resource, name, pattern, operations in acls():
        for operation in operations.split(","):
            what = (RESOURCES[resource], name, PATTERNS[pattern])
            request = CreateAclsRequest(*what, f"User:{role}", "*", OPERATIONS[operation.strip()], ALLOW)
            response = await admin._send_request(request)
            assert response.to_object()["creation_responses"][0]["error_code"] == 0
    await admin.close()


@pytest.fixture(scope="module")
def secured(kafka_tools: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("secured")) as server:
        asyncio.run(allow(server.bootstrap_servers))
        yield server


def as_user(server: SecuredKafka, user: str, how: str) -> dict[str, object]:
    """Settings of a client that proves to be `user`: `how` is a mechanism, `/TLS` encrypts it, TLS alone certifies."""
    mechanism, _, tls = how.partition("/")
    files: dict[str, object] = {"tls_ca_file": server.folder / "ca.pem"}
    if how == "TLS":
        named = {"tls_certificate_file": f"{user}.pem", "tls_key_file": f"{user}.key"}
        files |= {name: server.folder / file for name, file in named.items()}
        address = {"security_protocol": "SSL", "bootstrap_servers": server.tls}
        return {**address, **files, "tls_key_password": password_of(user)}
    address = {"security_protocol": "SASL_SSL", "bootstrap_servers": server.sasl_tls, **files}
    if not tls:
        address = {"security_protocol": "SASL_PLAINTEXT", "bootstrap_servers": server.sasl}
    if mechanism == "OAUTHBEARER":
        token = server.folder / f"{user}.token"
        token.write_text(unsigned_token(user, time.time()))
        return {**address, "sasl_mechanism": mechanism, "sasl_oauth_token_file": token}
    return {
        **address,
        "sasl_mechanism": mechanism,
        "sasl_username": user,
        "sasl_password": password_of(user),
    }


def broker_of(server: SecuredKafka, user: str, how: str = "SCRAM-SHA-256", **changes: object) -> KafkaBroker:
    settings = Settings(**{**as_user(server, user, how), **changes})
    return build_broker(settings, start_timeout_seconds=3.0)


@asynccontextmanager
async def worker(server: SecuredKafka, user: str, how: str, **changes: object) -> AsyncIterator[asyncio.Task]:
    settings = Settings(**as_user(server, user, how), grace_seconds=5, reply_give_up_seconds=5, **changes)
    app = WorkerApp(settings, build_broker(settings), ScriptedEngine(), SystemClock())
    running = asyncio.create_task(app.run())
    yield running
    app.request_stop()
    await running


async def answer_to(broker: KafkaBroker, names: TopicNames, text: str) -> Answer:
    async with Client(broker, names) as client:
        return await client.ask(Prompt(text), timeout_seconds=30)


async def cancelled(broker: KafkaBroker) -> None:
    """A client without a right to the control topic asks behind its prompt."""
    async with Client(broker, NAMES) as client, asyncio.timeout(30):
        prompt = Prompt("[[slow]] [[tokens=200]]", max_tokens=200)
        with pytest.raises(RequestFailedError, match="cancelled"):
            async for _ in client.stream(prompt):
                await client.cancel(prompt.request_id)


async def write(broker: KafkaBroker, topic: str) -> None:
    producer = broker.producer()
    await producer.start()
    try:
        await producer.send(topic, b"{}")
    finally:
        await producer.stop()


async def read(broker: KafkaBroker, topic: str) -> None:
    reader = broker.reader([topic], from_beginning=True)
    try:
        await reader.start()
        while not await reader.at_end():
            await reader.poll(10, 0.5)
    finally:
        await reader.stop()


@pytest.mark.parametrize(
    "how",
    ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512/TLS", "OAUTHBEARER", "OAUTHBEARER/TLS", "TLS"],
)
async def test_each_way_to_prove_who_one_is_opens_the_door(secured: SecuredKafka, how: str) -> None:
    """With a name, a token or a certificate, encrypted or not."""
    admin = broker_of(secured, "operator", how).admin()
    await admin.start()
    assert await admin.cluster_id()
    await admin.stop()


WRONG = {
    "the password": ("SCRAM-SHA-256", {"sasl_password": "guessed"}),
    "no certificate": ("TLS", {"tls_certificate_file": None, "tls_key_file": None, "tls_key_password": None}),
    "an authority that did not sign": ("SCRAM-SHA-256/TLS", {"tls_ca_file": None}),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_who_cannot_prove_it_stays_outside(secured: SecuredKafka, wrong: str) -> None:
    """And so does a client that was given another Kafka's authority: it talks to nobody it cannot check."""
    how, changes = WRONG[wrong]
    admin = broker_of(secured, "operator", how, **changes).admin()
    with pytest.raises(BrokerUnavailableError):
        await admin.start()


async def test_every_role_can_do_its_work_and_no_more(secured: SecuredKafka) -> None:
    """The operator makes the topics, the worker answers the client, also in a topic of its own; what each must not do
    is refused by Kafka."""
    operator = broker_of(secured, "operator", "PLAIN")
    wanted = topics_of(NAMES, max_body_bytes=1_000_000, num_partitions=2)
    assert len(await create_topics(operator.admin(), wanted)) == len(wanted)
    asking = broker_of(secured, "client", "OAUTHBEARER/TLS")
    async with worker(secured, "worker", "SCRAM-SHA-512/TLS"):
        assert (await answer_to(asking, NAMES, "hello")).text
        await cancelled(asking)
        own = NAMES.reply_for("mine")
        producer = asking.producer()
        await producer.start()
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        headers = (("x-request-id", b"mine"), ("x-reply-topic", own.encode()))
        await producer.send(NAMES.prompts("urgent"), body, headers=headers)
        await producer.send(NAMES.prompts("bulk"), b"{broken", headers=(("x-request-id", b"bad"),))
        await producer.stop()
        async with asyncio.timeout(30):
            while not await _records(operator, own) or not await _records(operator, NAMES.dead_letter):
                pass
    for topic in (NAMES.replies, NAMES.control, NAMES.dead_letter, "elsewhere"):
        with pytest.raises(BrokerError):
            await write(asking, topic)
    for topic in (NAMES.prompts("urgent"), NAMES.control, NAMES.dead_letter):
        with pytest.raises(BrokerError):
            await read(asking, topic)
    async with Client(operator, NAMES) as client:
        await client.cancel("mine")
    await write(operator, NAMES.prompts("bulk"))
    admin = operator.admin()
    await admin.start()
    place = TopicPartition(NAMES.prompts("urgent"), 0)
    assert await admin.committed("v4flash", [place])
    await admin.stop()


async def _records(broker: KafkaBroker, topic: str) -> int:
    reader = broker.reader([topic], from_beginning=True)
    num = 0
    try:
        await reader.start()
        while not await reader.at_end():
            num += len(await reader.poll(10, 0.2))
    except TopicNotAvailableError:
        return 0
    finally:
        await reader.stop()
    return num


async def test_the_doctor_tells_what_a_role_may_and_what_is_missing(secured: SecuredKafka) -> None:
    """Nothing fails for a worker and a client with the ACLs of the page; the roles exchanged, each lacks its rights;
    and who is not let in hears Kafka's reason."""
    names = TopicNames("v4flash-dev.doctor")
    wanted = topics_of(names, max_body_bytes=1_000_000, num_partitions=1)
    await create_topics(broker_of(secured, "developer").admin(), wanted)

    async def examined(user: str, role: Role, **changes: object) -> dict[Severity, list[str]]:
        settings = Settings(**{**as_user(secured, user, "SCRAM-SHA-256"), "max_body_bytes": 1_000_000, **changes})
        found: dict[Severity, list[str]] = {}
        for finding in findings(settings, await facts_of(settings, role), role):
            found.setdefault(finding.severity, []).append(f"{finding.subject} {finding.said}")
        return found

    dev = {"prefix": names.prefix, "group_id": names.prefix}
    for role in Role:
        found = await examined("developer", role, **dev)
        assert found.keys() == {Severity.OK, Severity.UNKNOWN}, found
    await create_topics(
        broker_of(secured, "operator").admin(), topics_of(NAMES, max_body_bytes=1_000_000, num_partitions=2)
    )
    assert Severity.FAILED not in await examined("worker", Role.WORKER)
    assert Severity.FAILED not in await examined("client", Role.CLIENT)
    swapped = (await examined("client", Role.WORKER))[Severity.FAILED]
    assert "v4flash.prompts.urgent read: no ACL allows it (ops/security.md)" in swapped
    assert "v4flash join: no ACL allows it (ops/security.md)" in swapped
    seen = await examined("operator", Role.CLIENT)
    assert seen.keys() == {Severity.OK}, seen
    refused = await examined("worker", Role.WORKER, sasl_password="guessed")
    assert refused.keys() == {Severity.FAILED}
    assert "invalid credentials" in refused[Severity.FAILED][0]


async def test_a_developer_has_a_world_of_their_own(secured: SecuredKafka) -> None:
    """Topics, worker and client below the prefix of developers; nothing of the real ones can even be seen."""
    names, developer = TopicNames("v4flash-dev.me"), broker_of(secured, "developer")
    await create_topics(developer.admin(), topics_of(names, max_body_bytes=1_000_000, num_partitions=1))
    async with worker(secured, "developer", "TLS", prefix=names.prefix, group_id=names.prefix):
        assert (await answer_to(developer, names, "hello")).text
    admin = developer.admin()
    await admin.start()
    assert {name.split(".")[0] for name in await admin.partition_counts()} == {"v4flash-dev"}
    with pytest.raises(BrokerError):
        await admin.create_topics([NewTopic("v4flash.mine")])
    await admin.stop()
    with pytest.raises(BrokerError):
        await write(developer, NAMES.prompts("bulk"))
    with pytest.raises(BrokerError):
        await read(developer, NAMES.replies)


async def test_a_stranger_is_told_nothing(secured: SecuredKafka) -> None:
    """A principal without ACLs sees no topic, and a worker of theirs ends with a reason instead of waiting."""
    stranger = broker_of(secured, "nobody")
    admin = stranger.admin()
    await admin.start()
    assert await admin.partition_counts() == {}
    await admin.stop()
    with pytest.raises(BrokerError):
        await write(stranger, NAMES.prompts("bulk"))
    settings = Settings(**as_user(secured, "nobody", "PLAIN"), grace_seconds=1)
    app = WorkerApp(settings, build_broker(settings), ScriptedEngine(), SystemClock())
    with pytest.raises(BrokerError):
        async with asyncio.timeout(60):
            await app.run()
