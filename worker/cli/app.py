"""The commands. Each reads its settings, calls one function of the worker, and prints."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from engine.api import PriorityClass
from topics.attempts import AttemptReader, AttemptState, EventKind
from worker import client
from worker.cli.flags import LoadedSettings, with_settings
from worker.errors import SettingsError
from worker.logs import configure_logs
from worker.provision import DEFAULT_PARTITIONS, create_topics, topics_of
from worker.serve import build_broker, serve

# `--max_num_seqs` and `--max-num-seqs` are the same flag.
CONTEXT = {"token_normalize_func": lambda token: token.replace("_", "-"), "help_option_names": ["-h", "--help"]}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Kafka-native worker for LLMs."
)
topics_app = typer.Typer(no_args_is_help=True, help="The topics of a worker group.")
config_app = typer.Typer(no_args_is_help=True, help="The settings.")
app.add_typer(topics_app, name="topics")
app.add_typer(config_app, name="config")


@app.command(context_settings=CONTEXT)
@with_settings
def worker(
    loaded: LoadedSettings,
    until_end: Annotated[bool, typer.Option("--until-end", help="End when what is there now is answered.")] = False,
) -> None:
    """Answer prompts until SIGTERM, then drain."""
    configure_logs(loaded.settings.log_level, log_format=loaded.settings.log_format)
    asyncio.run(serve(loaded.settings, until_end=until_end))


@app.command(context_settings=CONTEXT)
@with_settings
def demo(
    loaded: LoadedSettings,
    once: Annotated[bool, typer.Option("--once", help="No live view; end after the answers.")] = False,
    bootstrap: Annotated[str | None, typer.Option("--bootstrap", help="Use this Kafka.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Use no Kafka at all.")] = False,
) -> None:
    """Watch a small model answer Kafka prompts of three classes."""
    from worker.demo import run_demo

    configure_logs("warning", log_format=loaded.settings.log_format)
    raise typer.Exit(asyncio.run(run_demo(loaded.settings, live=not once, bootstrap=bootstrap, memory=memory)))


@app.command(context_settings=CONTEXT)
@with_settings
def submit(
    loaded: LoadedSettings,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the prompt from a file.")] = None,
    priority: Annotated[PriorityClass, typer.Option("--priority")] = PriorityClass.STANDARD,
    max_tokens: Annotated[int, typer.Option("--max-tokens")] = 256,
    temperature: Annotated[float, typer.Option("--temperature")] = 0.0,
) -> None:
    """Send one prompt and print its answer as it streams."""
    text = file.read_text(encoding="utf-8") if file else prompt
    text = sys.stdin.read() if text in (None, "-") else text
    if not text or not text.strip():
        raise SettingsError("the prompt is empty")
    raise typer.Exit(asyncio.run(_submit(loaded, client.Prompt(text, priority, max_tokens, temperature))))


async def _submit(loaded: LoadedSettings, prompt: client.Prompt) -> int:
    answer, shown = AttemptReader(), False
    print(f"request {prompt.request_id}", file=sys.stderr)
    async for event in client.ask(build_broker(loaded.settings), loaded.settings.names, prompt, answer):
        if event.kind is EventKind.SHOW and shown:
            print("\n[a new attempt begins]", file=sys.stderr)
        elif event.kind is EventKind.TEXT:
            shown = True
            print(event.text, end="", flush=True)
    print()
    if answer.state is AttemptState.ERROR:
        error = answer.error or {}
        print(f"{error.get('code')}: {error.get('message')}", file=sys.stderr)
        return 1
    return 0


@app.command(context_settings=CONTEXT)
@with_settings
def tail(
    loaded: LoadedSettings,
    topic: Annotated[str | None, typer.Option("--topic", help="Default: the shared reply topic.")] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin with the oldest record.")] = False,
    until_now: Annotated[bool, typer.Option("--until-now", help="End at the end of the topic.")] = False,
) -> None:
    """Print the records of a topic as they come."""
    asyncio.run(_tail(loaded, topic or loaded.settings.names.replies, from_start=from_start, until_now=until_now))


async def _tail(loaded: LoadedSettings, topic: str, *, from_start: bool, until_now: bool) -> None:
    reader = build_broker(loaded.settings).reader([topic], from_beginning=from_start)
    try:
        await reader.start()
        while not (until_now and await reader.at_end()):
            for record in await reader.poll(client.POLL_RECORDS, client.POLL_SECONDS):
                named = dict(record.headers)
                words = [(named.get(name) or b"-").decode("utf-8", "replace") for name in ("x-request-id", "x-event")]
                value = (record.value or b"").decode("utf-8", "replace")
                print(f"{record.partition}:{record.offset} {' '.join(words)} {value}", flush=True)
    finally:
        await reader.stop()


@app.command(context_settings=CONTEXT)
@with_settings
def cancel(
    loaded: LoadedSettings, request_id: Annotated[str, typer.Argument()], tenant: Annotated[str, typer.Option()] = ""
) -> None:
    """Ask the workers to stop a request."""
    asyncio.run(client.cancel(build_broker(loaded.settings), loaded.settings.names, request_id, tenant=tenant))


@topics_app.command("create", context_settings=CONTEXT)
@with_settings
def topics_create(
    loaded: LoadedSettings, partitions: Annotated[int, typer.Option("--partitions", min=1)] = DEFAULT_PARTITIONS
) -> None:
    """Create the topics that are missing."""
    settings = loaded.settings
    wanted = topics_of(settings.names, max_body_bytes=settings.max_body_bytes, num_partitions=partitions)
    created = asyncio.run(create_topics(build_broker(settings).admin(), wanted))
    for topic in wanted:
        print(f"{'created' if topic.name in created else 'exists '} {topic.name}")


@topics_app.command("list", context_settings=CONTEXT)
@with_settings
def topics_list(loaded: LoadedSettings) -> None:
    """Print the topics below the prefix with their partition counts."""
    for name, count in sorted(asyncio.run(_partition_counts(loaded)).items()):
        if name.startswith(f"{loaded.settings.prefix}."):
            print(f"{name} {count}")


async def _partition_counts(loaded: LoadedSettings) -> dict[str, int]:
    admin = build_broker(loaded.settings).admin()
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
