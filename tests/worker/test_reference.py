"""What newcomers read is what the code says of itself."""

import re
from pathlib import Path

import pytest

from topics.header_help import HEADER_HELP
from topics.headers import ALIASES
from worker.cli.reference import DEFAULT_PATH, reference_page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLACES = re.compile(r"\b(?:engine|kernels|ops|tests|topics|worker)/[\w./*-]*")


def test_the_reference_page_is_current() -> None:
    """`python -m worker.cli.reference` has been run since a setting, a header or a metric changed."""
    assert (ROOT / DEFAULT_PATH).read_text(encoding="utf-8") == reference_page()


def test_every_header_has_its_meaning() -> None:
    """A new alias group needs a sentence for the contract and the page."""
    assert HEADER_HELP.keys() == ALIASES.keys()


def test_the_readme_names_only_files_that_are_there() -> None:
    """Also behind the rows that say what to touch for a new model, policy, metric, reply mode or peer."""
    named = {place.rstrip(".") for place in PLACES.findall(README)}
    assert len(named) > 20
    assert [place for place in sorted(named) if not list(ROOT.glob(place.rstrip("/")))] == []


@pytest.mark.parametrize("folder", ["topics", "kernels", "engine", "worker", "tests", "ops"])
def test_the_tree_of_the_readme_names_only_what_is_below_its_folder(folder: str) -> None:
    """Names that end in a slash or .py stand somewhere below the folder of their line."""
    (line,) = re.findall(rf"^    {folder}/ +(.+)$", README, flags=re.MULTILINE)
    named = re.findall(r"[\w/]+(?:/|\.py)", line)
    missing = [name for name in named if not list((ROOT / folder).glob(f"**/{name.rstrip('/')}"))]
    assert missing == []
