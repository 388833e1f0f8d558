"""The page for people who come with a client of their own."""

import json
import re

from page import HERE, PAGE, filled

PAGE_TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_shows_the_code_that_the_tests_run() -> None:
    """`python tests/interop/page.py` has been run since a client changed, and every client is there."""
    assert filled(PAGE_TEXT) == PAGE_TEXT
    shown = set(re.findall(r"<!-- from (\S+) -->", PAGE_TEXT))
    sources = {path for kind in ("java", "mjs", "sh") for path in HERE.rglob(f"*.{kind}")} | {*HERE.glob("python/*.py")}
    with_snippet = {str(path.relative_to(HERE)) for path in sources if "snippet\n" in path.read_text(encoding="utf-8")}
    assert shown == with_snippet


def test_the_page_names_the_versions_that_are_tried() -> None:
    """As they are pinned."""
    pins = re.findall(r"==(\S+)", (HERE / "python" / "requirements.txt").read_text())
    pins += [
        version
        for name, version in json.loads((HERE / "nestjs" / "package.json").read_text())["dependencies"].items()
        if name in ("@nestjs/microservices", "kafkajs")
    ]
    pins += re.findall(
        r"spring-kafka</artifactId>\s*<version>(\S+)</version>", (HERE / "spring" / "pom.xml").read_text()
    )
    assert len(pins) == 5
    assert not [version for version in pins if version not in PAGE_TEXT]
