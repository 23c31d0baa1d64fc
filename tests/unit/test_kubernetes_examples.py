"""The manifests of `examples/kubernetes` agree with the exit codes, options and defaults of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from resilience_sdk.cli.supervise import patience_s
from resilience_sdk.core import environ
from resilience_sdk.core.settings import Settings, load_settings
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.launcher.options import most_nodes, parse_options
from resilience_sdk.postmortem.exit_codes import EXIT_FAILED, EXIT_HARDWARE, EXIT_INTERRUPTED, EXIT_STOP, EXIT_USAGE

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.stem)
def documents(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(request.param.read_text()))


@pytest.fixture
def job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == "Job"]
    spec: dict[str, Any] = found["spec"]
    return spec


@pytest.fixture
def pod(job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["template"]["spec"]
    return spec


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return dict(found)


@pytest.fixture
def variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "from-the-pod") for entry in container["env"]}


def action(job: dict[str, Any], code: int, condition: str = "") -> str | None:
    """Return what the first rule that fits does, as the Job controller finds it."""
    for rule in job["podFailurePolicy"]["rules"]:
        if (codes := rule.get("onExitCodes")) and (code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
        if condition in [entry["type"] for entry in rule.get("onPodConditions", [])]:
            return str(rule["action"])
    return None


def test_there_are_manifests() -> None:
    """One pod and several."""
    assert [path.stem for path in MANIFESTS] == ["one-pod", "several-pods"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (EXIT_PREEMPTED, "Ignore"),
        (EXIT_HARDWARE, "Count"),
        (EXIT_STOP, "FailJob"),
        (EXIT_USAGE, "FailJob"),
        (EXIT_INTERRUPTED, "FailJob"),
        (EXIT_FAILED, None),
        (137, None),
    ],
)
def test_exit_codes_become_the_right_actions(job: dict[str, Any], code: int, expected: str | None) -> None:
    """A preemption is free, hardware and failures are counted, what cannot get better is not tried again."""
    assert action(job, code) == expected
    drained = action(job, code, "DisruptionTarget")
    assert drained == ("Ignore" if expected is None else expected)


def test_what_a_failure_policy_requires(job: dict[str, Any], container: dict[str, Any]) -> None:
    """The API refuses it with another restart policy, and rules that name no container of the pod never fit."""
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["podReplacementPolicy"] == "Failed"
    named = {rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert named == {container["name"]}
    assert all(0 not in rule.get("onExitCodes", {}).get("values", []) for rule in job["podFailurePolicy"]["rules"])


def test_the_grace_period_is_longer_than_the_time_to_save(pod: dict[str, Any], variables: dict[str, str]) -> None:
    """The launcher ends the ranks after preempt_time and has time left to write the verdict, also under supervise."""
    settings = load_settings(env=variables, strict_env=True)
    assert settings.preempt_time == Settings().preempt_time
    assert pod["terminationGracePeriodSeconds"] > patience_s(settings)


def test_variables_are_known_to_the_code(variables: dict[str, str], pod: dict[str, Any]) -> None:
    """A misspelt variable would be refused, and the run directory lies below the volume."""
    settings = load_settings(env=variables, strict_env=True)
    assert settings.run_dir == variables[environ.RUN_DIR]
    assert environ.JOB_ID in variables
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    place = Path(variables[environ.RUN_DIR])
    assert "persistentVolumeClaim" in volumes[mounts[str(place.parent)]]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_the_command_is_one_that_the_launcher_takes(
    documents: list[dict[str, Any]],
    job: dict[str, Any],
    container: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every option exists; several pods meet at the first one, through the Service, as many as there are pods."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else torch sets it, for the tests that follow too
    (tmp_path / "train.py").touch()
    program, command, *words = container["command"]
    assert (program, command) == ("resilience", "run")
    options = parse_options(words, env={"OMP_NUM_THREADS": "1"})
    assert most_nodes(options.elastic) == job.get("completions", 1)
    if job.get("completionMode") != "Indexed":
        assert options.one_node
        return
    assert job["parallelism"] == job["completions"]
    (service,) = [document for document in documents if document["kind"] == "Service"]
    (name,) = [document["metadata"]["name"] for document in documents if document["kind"] == "Job"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert options.meeting_point.startswith(f"{name}-0.{service['metadata']['name']}:")


def test_the_page_names_every_exit_code() -> None:
    """A reader finds what each code leads to."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for code in (EXIT_PREEMPTED, EXIT_HARDWARE, EXIT_STOP, EXIT_INTERRUPTED):
        assert str(code) in page
    for path in MANIFESTS:
        assert f"../examples/kubernetes/{path.name}" in page
