"""Dockerfile, compose and Kubernetes files, as far as reading them goes.

Not run anywhere here, for want of a container engine: `docker build`, `docker compose up`, `kubectl apply`. The steps
of the Dockerfile (environment, torch, package, kernels) were run by hand, its worker as user 10001 and as process 1.
"""

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from worker.settings import ENV_PREFIX, NO_SETTINGS, Settings

ROOT = Path(__file__).parents[2]
PORTS = {Settings.model_fields[name].default for name in ("port", "metrics_port")}
PROBES = {"/live", "/ready", "/health"}
COMPOSE = yaml.safe_load((ROOT / "ops" / "compose" / "compose.yml").read_text())
KUBERNETES = list(yaml.safe_load_all((ROOT / "ops" / "kubernetes" / "worker.yml").read_text()))


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each, comments left out and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, rest in (line.split(maxsplit=1) for line in joined.splitlines())]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


def settings_of(names: Iterator[str] | list[str]) -> None:
    """Each is a setting of the worker, or a variable of the machine."""
    for name in names:
        if name.startswith(ENV_PREFIX) and name not in NO_SETTINGS:
            assert name.removeprefix(ENV_PREFIX).lower() in Settings.model_fields, name


def kind(name: str) -> dict[str, Any]:
    (found,) = [each for each in KUBERNETES if each["kind"] == name]
    return found


def test_the_image_is_two_stages_and_runs_without_rights() -> None:
    """The compiler stays behind; nobody is root; process 1 is the worker itself and no shell."""
    build, final = stages()
    assert any("g++" in rest for name, rest in build if name == "RUN")
    assert not any("g++" in rest or "apt-get" in rest for _, rest in final)
    named = dict(final)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", named["USER"])
    assert json.loads(named["ENTRYPOINT"]) == ["v4flash"]
    assert json.loads(named["CMD"]) == ["worker"]
    assert named["STOPSIGNAL"] == "SIGTERM"
    assert {int(port) for port in named["EXPOSE"].split()} == PORTS


def test_the_dockerfile_keeps_to_what_linters_ask() -> None:
    """Versions are named, lists of packages are not kept, and nothing is added from afar."""
    for name, rest in instructions():
        assert name in {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "STOPSIGNAL"} | {
            "HEALTHCHECK",
            "ENTRYPOINT",
            "CMD",
        }
        if name == "FROM":
            assert ":" in rest
            assert ":latest" not in rest
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
        if "pip install" in rest and "uv pip" not in rest:
            assert re.search(r"--no-cache-dir \S+==\S+$", rest)
        if "uv pip install" in rest:
            assert rest.count("-c constraints.txt") == rest.count("uv pip install")


def test_what_is_copied_exists_and_is_all_that_the_package_is_made_of() -> None:
    """And `.dockerignore` lets it through."""
    (build, _) = stages()
    sources = {source for name, rest in build if name == "COPY" for source in rest.split()[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    passed = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    assert sources == passed
    (packages,) = re.findall(
        r"\[tool.setuptools.packages.find\]\ninclude = (\[.*\])", (ROOT / "pyproject.toml").read_text()
    )
    assert all(any(fnmatch.fnmatch(source, wanted) for source in sources) for wanted in json.loads(packages))


def test_variables_are_settings() -> None:
    """A variable that no setting has would stop the worker at its start."""
    image = dict(pair.split("=", 1) for name, rest in instructions() if name == "ENV" for pair in rest.split())
    settings_of(list(image))
    assert image["V4FLASH_KERNEL_CACHE"] == "/opt/v4flash/kernels"
    for service in ("topics", "worker"):
        settings_of(list(COMPOSE["services"][service]["environment"]))
    settings_of(list(kind("ConfigMap")["data"]))


def test_health_is_asked_where_it_is_told() -> None:
    """The image's own check and Kubernetes' probes."""
    (check,) = [rest for name, rest in instructions() if name == "HEALTHCHECK"]
    port, path = re.search(r"127\.0\.0\.1:(\d+)(/\w+)", check).groups()
    assert int(port) in PORTS
    assert path in PROBES
    (container,) = kind("Deployment")["spec"]["template"]["spec"]["containers"]
    assert {port["containerPort"] for port in container["ports"]} == PORTS
    probes = [probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")]
    assert len(probes) == 2
    assert all(probe["path"] in PROBES and probe["port"] == "health" for probe in probes)


def test_who_stops_a_worker_waits_longer_than_it_drains() -> None:
    """Else every stop is a kill, and its prompts are answered twice."""
    worker = COMPOSE["services"]["worker"]
    assert int(worker["stop_grace_period"].removesuffix("s")) > float(worker["environment"]["V4FLASH_GRACE_SECONDS"])
    pod = kind("Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > float(kind("ConfigMap")["data"]["V4FLASH_GRACE_SECONDS"])


def test_compose_makes_topics_before_workers_and_hands_out_files_that_exist() -> None:
    """A worker without its topics would end at once."""
    services = COMPOSE["services"]
    assert services["worker"]["depends_on"] == {"topics": {"condition": "service_completed_successfully"}}
    assert services["topics"]["depends_on"] == {"kafka": {"condition": "service_healthy"}}
    assert services["topics"]["command"] == ["topics", "create"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / "ops" / "compose" / source).is_file(), source
    assert services["kafka"]["environment"]["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


@pytest.mark.parametrize("name", ["Job", "Deployment"])
def test_pods_have_no_rights(name: str) -> None:
    """Not root, no capabilities, nothing to write but /tmp; the user is the image's."""
    pod = kind(name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == int(dict(stages()[1])["USER"].split(":")[0])
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
        assert rights["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert all(mount.get("readOnly") or mount["mountPath"] == "/tmp" for mount in mounts.values())


def test_the_scaler_asks_for_what_a_worker_tells() -> None:
    """Backlog in tokens and the age of the oldest prompt; never zero workers, for then nobody tells."""
    told = (ROOT / "worker" / "metrics.py").read_text()
    spec = kind("ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == kind("Deployment")["metadata"]["name"]
    assert spec["minReplicaCount"] >= 1
    for trigger in spec["triggers"]:
        (metric,) = re.findall(r"v4flash_partition_(\w+)", trigger["metadata"]["query"])
        assert f'by_partition("{metric}"' in told
