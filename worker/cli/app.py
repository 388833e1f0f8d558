"""The commands. Each reads its settings, calls one function of the worker, and prints."""

import sys
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.api import PriorityClass
from worker.cli.dead_letter import dead_letter_app
from worker.cli.doctor import doctor_app
from worker.cli.flags import LoadedSettings, with_client_settings, with_group_settings, with_settings
from worker.cli.inspect import inspect_prompt
from worker.cli.run import command_broker, run_command, silence_client
from worker.cli.submit import prompt_text, submit_prompt
from worker.cli.terminal import shown_text
from worker.client import Client, Prompt
from worker.logs import configure_logs
from worker.provision import DEFAULT_PARTITIONS, create_topics, topics_of
from worker.scan import follow
from worker.serve import serve
from worker.setting_sources import Source

# `--max_num_seqs` and `--max-num-seqs` are the same flag.
CONTEXT = {"token_normalize_func": lambda token: token.replace("_", "-"), "help_option_names": ["-h", "--help"]}

LOOK: dict[str, Any] = {"no_args_is_help": True, "context_settings": CONTEXT, "rich_markup_mode": None}

app = typer.Typer(
    **LOOK, add_completion=False, pretty_exceptions_enable=False, help="Kafka-native batch and stream worker for LLMs."
)
topics_app = typer.Typer(**LOOK, help="The topics of a worker group.")
config_app = typer.Typer(**LOOK, help="The settings.")
app.add_typer(topics_app, name="topics")
app.add_typer(config_app, name="config")
app.add_typer(dead_letter_app, name="dead-letter")
app.add_typer(doctor_app, name="doctor")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"v4flash {version('v4flash')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Kafka-native batch and stream worker for large language models."""


@app.command(context_settings=CONTEXT)
@with_settings
def worker(
    loaded: LoadedSettings,
    until_end: Annotated[bool, typer.Option("--until-end", help="End when what is there now is answered.")] = False,
) -> None:
    """Answer prompts until SIGTERM, then drain."""
    configure_logs(loaded.settings.log_level, log_format=loaded.settings.log_format)
    raise typer.Exit(serve(loaded.settings, until_end=until_end))


@app.command(context_settings=CONTEXT)
@with_settings
def demo(
    loaded: LoadedSettings,
    once: Annotated[bool, typer.Option("--once", help="No live view; end after the answers.")] = False,
    bootstrap: Annotated[
        str | None, typer.Option("--bootstrap", help="Use this Kafka; --bootstrap-servers is the same.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Use no Kafka at all.")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="Write the view at the end to this SVG.")] = None,
) -> None:
    """Watch a small model answer Kafka prompts of three classes."""
    from worker.demo import run_demo

    configure_logs("warning", log_format=loaded.settings.log_format)
    silence_client()  # the broker of the demo is still starting when it is called first
    if loaded.sources["bootstrap_servers"] is Source.FLAG:  # a variable meant for workers gets no topics of the demo
        bootstrap = bootstrap or loaded.settings.bootstrap_servers
    showing = run_demo(loaded.settings, live=not once, bootstrap=bootstrap, memory=memory, picture=picture)
    raise typer.Exit(run_command(showing))


@app.command(context_settings=CONTEXT)
@with_client_settings
def submit(
    loaded: LoadedSettings,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the prompt from a file.")] = None,
    priority: Annotated[PriorityClass, typer.Option("--priority", help="The service class.")] = PriorityClass.STANDARD,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="Cancel when it takes longer.")
    ] = None,
) -> None:
    """Send one prompt and print its answer as it streams."""
    asked = Prompt(prompt_text(prompt, file), priority, max_tokens, temperature)
    answering = submit_prompt(command_broker(loaded.settings), loaded.settings.names, asked, timeout)
    raise typer.Exit(run_command(answering))


@app.command(context_settings=CONTEXT)
@with_client_settings
def tail(
    loaded: LoadedSettings,
    topic: Annotated[str | None, typer.Option("--topic", help="Default: the shared reply topic.")] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin with the oldest record.")] = False,
    until_now: Annotated[bool, typer.Option("--until-now", help="End at the end of the topic.")] = False,
) -> None:
    """Print the records of a topic as they come."""
    run_command(
        _tail(loaded, topic or loaded.settings.names.replies, from_start=from_start, until_now=until_now),
    )


async def _tail(loaded: LoadedSettings, topic: str, *, from_start: bool, until_now: bool) -> None:
    broker = command_broker(loaded.settings)
    async with aclosing(follow(broker, [topic], from_beginning=from_start, until_end=until_now)) as records:
        async for record in records:
            named = dict(record.headers)
            words = [(named.get(name) or b"-").decode("utf-8", "replace") for name in ("x-request-id", "x-event")]
            value = (record.value or b"").decode("utf-8", "replace")
            print(shown_text(f"{record.partition}:{record.offset} {' '.join(words)} {value}"), flush=True)


@app.command(context_settings=CONTEXT)
@with_client_settings
def cancel(
    loaded: LoadedSettings,
    request_id: Annotated[str, typer.Argument(help="As `submit` prints it, or the x-request-id of the prompt.")],
    tenant: Annotated[str, typer.Option("--tenant", help="The prompt's tenant, where its route names one.")] = "",
) -> None:
    """Ask the workers to stop a request."""
    run_command(_cancel(loaded, request_id, tenant))
    print(f"asked the workers to stop {request_id}", file=sys.stderr)


async def _cancel(loaded: LoadedSettings, request_id: str, tenant: str) -> None:
    async with Client(command_broker(loaded.settings), loaded.settings.names) as client:
        await client.cancel(request_id, tenant=tenant)


@app.command(context_settings=CONTEXT)
@with_group_settings
def inspect(
    loaded: LoadedSettings,
    prompt: Annotated[str, typer.Argument(metavar="ID|TOPIC:PARTITION:OFFSET", help="The request id, or its place.")],
) -> None:
    """Tell where a prompt is: not polled, queued, running, answered, committed or dead-lettered."""
    looking = inspect_prompt(command_broker(loaded.settings), loaded.settings, prompt)
    raise typer.Exit(run_command(looking))


@app.command("build-kernels", context_settings=CONTEXT)
def build_kernels(
    directory: Annotated[Path | None, typer.Option("--directory", help="Instead of the user's cache.")] = None,
) -> None:
    """Compile the CPU operations now.

    For an image or a machine without a compiler; every CPU variant is built, whatever this CPU is.
    """
    from engine.device import build_kernels as build

    for library in build(directory):
        print(library)


@topics_app.command("create", context_settings=CONTEXT)
@with_client_settings
def topics_create(
    loaded: LoadedSettings,
    partitions: Annotated[
        int, typer.Option("--partitions", min=1, help="Of each prompt and reply topic.")
    ] = DEFAULT_PARTITIONS,
) -> None:
    """Create the topics that are missing."""
    settings = loaded.settings
    wanted = topics_of(settings.names, max_body_bytes=settings.max_body_bytes, num_partitions=partitions)
    created = run_command(create_topics(command_broker(settings).admin(), wanted))
    for topic in wanted:
        print(f"{'created' if topic.name in created else 'exists '} {topic.name}")


@topics_app.command("list", context_settings=CONTEXT)
@with_client_settings
def topics_list(loaded: LoadedSettings) -> None:
    """Print the topics below the prefix with their partition counts."""
    below = f"{loaded.settings.prefix}."
    found = run_command(_partition_counts(loaded))
    counts = {name: count for name, count in sorted(found.items()) if name.startswith(below)}
    for name, count in counts.items():
        print(f"{name} {count}")
    if not counts:
        print(f"no topic begins with {below} (`v4flash topics create` makes them)", file=sys.stderr)


async def _partition_counts(loaded: LoadedSettings) -> dict[str, int]:
    admin = command_broker(loaded.settings).admin()
    await admin.start()
    try:
        return await admin.partition_counts()
    finally:
        await admin.stop()


@config_app.command("show", context_settings=CONTEXT)
@with_settings
def config_show(loaded: LoadedSettings) -> None:
    """Print each setting with its value and where that came from."""
    for name, value, source in loaded.rows():
        print(f"{name} = {value}  ({source})")
