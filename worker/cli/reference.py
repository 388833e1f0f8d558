"""The reference page, made of what the code says of itself: headers, settings, variables, metrics.

`python -m worker.cli.reference` writes it to `ops/reference.md`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from topics.header_help import HEADER_HELP
from topics.headers import ALIASES
from topics.reply_bodies import ReplyHeaders
from worker.cli.flags import DEFAULTS
from worker.cli.settings_help import SETTINGS_HELP
from worker.metrics import Metrics
from worker.settings import ALIASES as OTHER_NAMES

DEFAULT_PATH = Path("ops") / "reference.md"

INTRODUCTION = """# Reference

Made by `python -m worker.cli.reference`; what is here is what the code says of itself.
The bodies of prompts and replies are in `asyncapi.json`.
"""

SAMPLING = """
## Sampling

Fields that a body leaves out have OpenAI's defaults: `temperature` 1.0, `top_p` 1.0, `n` 1. So a plain body draws its
words: for the likeliest ones say `"temperature": 0` (`v4flash submit` does). Without a `seed` one is made of the
request id and the `seed` of the worker, so that a second attempt of a prompt says the same. The role `developer` is
another name of `system`.
"""

SOURCES = "\nEach is a flag (`--num-blocks`), a variable (`V4FLASH_NUM_BLOCKS`) or a line of the file of `--config`.\n"

VARIABLES = (
    ("V4FLASH_CONFIG", "The TOML file of settings; the same as `--config`."),
    ("V4FLASH_ISA", "`amx`, `v4`, `v3` or `none`: which compiled operations run; the best of this CPU when not given."),
    ("V4FLASH_KERNEL_CACHE", "Where compiled operations lie; else `v4flash/kernels` in the user's cache directory."),
    ("CXX", "The compiler of the operations; else g++."),
    ("OMP_WAIT_POLICY", "`passive` when not given: threads of an operation that wait sleep."),
)


def reference_page() -> str:
    """The whole page; the same text every time."""
    return "".join(
        (
            INTRODUCTION,
            _section("Headers of a prompt", ("header", "also as", "meaning"), _request_headers()),
            "\nNames are compared without case; of a repeated header the last one counts.\n",
            _section("Headers of a reply", ("header", "meaning"), _reply_headers()),
            "\nBeside these: the correlation id under the name it came in, and the `reply_headers` of the route.\n",
            SAMPLING,
            _section("Settings", ("setting", "default", "meaning"), _settings()),
            SOURCES,
            _section("Variables of the machine", ("variable", "meaning"), VARIABLES),
            _section("Metrics", ("metric", "kind", "meaning"), _metrics()),
        )
    )


def _section(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *((f"`{name}`", *rest) for name, *rest in rows)]
    table = "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
    return f"\n## {title}\n\n{table}\n"


def _request_headers() -> Iterator[tuple[str, str, str]]:
    for field, names in ALIASES.items():
        *others, ours = names  # the ecosystem's names come first in the table
        yield ours, ", ".join(f"`{name}`" for name in others), HEADER_HELP[field]


def _reply_headers() -> Iterator[tuple[str, str]]:
    for name, field in ReplyHeaders.model_fields.items():
        yield field.alias or name, field.description or ""


def _settings() -> Iterator[tuple[str, str, str]]:
    for name, value in DEFAULTS.items():
        also = ", ".join(f"`{alias}`" for alias, target in OTHER_NAMES.items() if target == name)
        meaning = SETTINGS_HELP[name] + (f" Also {also}." if also else "")
        yield name, "" if value in ("null", "[]") else f"`{value}`", meaning


def _metrics() -> Iterator[tuple[str, str, str]]:
    for family in Metrics().registry.collect():
        yield family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation


def main() -> None:
    DEFAULT_PATH.write_text(reference_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
