"""`v4flash doctor kafka`: what the cluster lacks, as a table and an exit code."""

from typing import Annotated

import typer

from worker.broker.api import BrokerUnavailableError
from worker.broker.kafka_probe import KafkaProbe
from worker.cli.flags import LoadedSettings, with_group_settings
from worker.cli.run import CONNECT_SECONDS, run_command, silence_client
from worker.doctor import ClusterFacts, Finding, Right, Role, Severity, findings, needed_rights, prompt_topics
from worker.serve import kafka_connection
from worker.settings import Settings

CONTEXT = {"token_normalize_func": lambda token: token.replace("_", "-"), "help_option_names": ["-h", "--help"]}
EXIT_FAILED = 1

doctor_app = typer.Typer(no_args_is_help=True, help="Checks of what a worker stands on.")


@doctor_app.callback()
def doctor() -> None:
    """Checks of what a worker stands on."""


@doctor_app.command(context_settings=CONTEXT)
@with_group_settings
def kafka(
    loaded: LoadedSettings,
    role: Annotated[Role, typer.Option("--role", help="Whose rights are checked.")] = Role.WORKER,
) -> None:
    """Check the cluster: reachability, topics, rights, limits, retention. Exit code 1 when something fails."""
    silence_client()
    settings = loaded.settings
    facts = run_command(facts_of(settings, role))
    found = findings(settings, facts, role)
    _print(found)
    failed = sum(finding.severity is Severity.FAILED for finding in found)
    warned = sum(finding.severity is Severity.WARNING for finding in found)
    print(f"{len(found)} checks, {failed} failed, {warned} warnings")
    raise typer.Exit(EXIT_FAILED if failed else 0)


async def facts_of(settings: Settings, role: Role) -> ClusterFacts:
    """Ask the cluster, with the rights that the settings give. A cluster out of reach is a fact too."""
    probe = KafkaProbe(kafka_connection(settings, start_timeout_seconds=CONNECT_SECONDS))
    refused = await probe.unreachable()
    try:
        await probe.start()
        counts = await probe.partition_counts()
        names = settings.names
        ours = {*prompt_topics(settings, counts), names.replies, names.control, names.dead_letter}
        ours |= {route.output_topic for route in settings.route_table.routes if route.output_topic is not None}
        rights = {right: await _has(probe, right) for right in needed_rights(settings, counts, role)}
        return ClusterFacts(
            refused,
            counts,
            await probe.topic_configs(sorted(ours & counts.keys())),
            await probe.broker_config(),
            rights,
        )
    except BrokerUnavailableError:
        if len(refused) < len(settings.bootstrap_servers.split(",")):
            raise
        return ClusterFacts(refused)
    finally:
        await probe.stop()


async def _has(probe: KafkaProbe, right: Right) -> bool:
    match right.kind:
        case "read":
            return await probe.may_read(right.name)
        case "write":
            return await probe.may_write(right.name)
        case _:
            return await probe.may_join(right.name)


def _print(found: list[Finding]) -> None:
    first = max(len(finding.severity) for finding in found)
    second = max(len(finding.subject) for finding in found)
    for finding in found:
        print(f"{finding.severity:{first}}  {finding.subject:{second}}  {finding.said}")


__all__ = ["doctor_app", "facts_of"]
