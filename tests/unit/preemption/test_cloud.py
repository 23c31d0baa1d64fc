"""The pollers of cloud notices against services on the loopback interface that speak the real protocols."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from metadata_services import Azure, Ec2, Gce, serving

from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError
from resilience_sdk.preemption import cloud as cloud_gcp
from resilience_sdk.preemption.cloud import ACTION, REBALANCE, TOKEN, TOKEN_S, MetadataService, cloud_poller


def test_ec2_spot_interruption_comes_with_its_time(ec2, clock):
    """Nothing is 404; then the action and when. One token serves all questions."""
    poller = cloud_poller("aws", ec2.url, clock=clock)
    assert poller.poll() is None
    ec2.documents[ACTION] = '{"action": "terminate", "time": "2023-11-14T22:15:20Z"}'
    notice = poller.poll()
    assert (notice.source, notice.deadline_unix) == ("aws spot", 1_700_000_120.0)
    assert "terminate" in notice.reason
    assert ec2.paths(TOKEN) == [200]
    assert 401 not in [status for *_, status in ec2.asked]


def test_ec2_rebalance_recommendation_has_no_time(ec2, clock):
    """It says that an interruption is likely, and gives way to the interruption itself."""
    poller = cloud_poller("aws", ec2.url, clock=clock)
    ec2.documents[REBALANCE] = '{"noticeTime": "2023-11-14T22:13:20Z"}'
    notice = poller.poll()
    assert (notice.source, notice.deadline_unix) == ("aws rebalance", None)
    ec2.documents[ACTION] = '{"action": "stop", "time": "2023-11-14T22:15:20Z"}'
    assert poller.poll().source == "aws spot"


def test_ec2_token_is_renewed_before_it_ends_and_when_it_is_refused(ec2, clock):
    """A 401 costs one more token and no notice; a token that is about to end is not used any more."""
    poller = cloud_poller("aws", ec2.url, clock=clock)
    ec2.documents[REBALANCE] = "{}"
    assert poller.poll() is not None
    ec2.expire_tokens()
    assert poller.poll() is not None
    assert ec2.paths(ACTION) == [404, 401, 404]
    assert ec2.paths(TOKEN) == [200, 200]
    clock.pass_s(TOKEN_S)
    ec2.expire_tokens()
    assert poller.poll() is not None
    assert ec2.paths(ACTION) == [404, 401, 404, 404]
    assert ec2.paths(TOKEN) == [200, 200, 200]


@pytest.mark.parametrize("document", ["{}", '{"time": 7}', '{"action": "stop", "time": "soon"}'])
def test_ec2_interruption_without_readable_details_is_still_one(ec2, clock, document):
    """That the document is there is the notice."""
    ec2.documents[ACTION] = document
    notice = cloud_poller("aws", ec2.url, clock=clock).poll()
    assert (notice.source, notice.deadline_unix) == ("aws spot", None)


def test_services_refuse_as_the_real_ones_do(ec2, gce, azure):
    """The services of these tests are strict: without token or header nobody gets an answer."""

    def status(service, path, method="GET", **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return MetadataService(service.url, 2.0).ask(path, headers=named, method=method).status

    assert status(ec2, ACTION) == 401
    assert status(ec2, ACTION, X_aws_ec2_metadata_token="guess") == 401
    assert status(ec2, TOKEN, "PUT") == 400
    assert status(gce, "/computeMetadata/v1/instance/preempted") == 403
    assert status(azure, "/metadata/scheduledevents?api-version=2020-07-01") == 400


def test_gce_preemption_ends_half_a_minute_after_it_was_seen(gce, clock, monkeypatch):
    """The end stays where it was first put, however often it is asked."""
    monkeypatch.setattr(cloud_gcp, "WAIT_S", 0)
    poller = cloud_poller("gcp", gce.url, clock=clock)
    assert poller.poll() is None
    gce.documents["preempted"] = "TRUE"
    first = poller.poll()
    assert (first.source, first.deadline_unix) == ("gcp preempted", clock.unix + 30)
    clock.pass_s(7)
    assert poller.poll().deadline_unix == first.deadline_unix


@pytest.mark.parametrize(
    ("event", "source"),
    [
        ("NONE", None),
        ("MIGRATE_ON_HOST_MAINTENANCE", None),
        ("TERMINATE_ON_HOST_MAINTENANCE", "gcp maintenance"),
    ],
)
def test_gce_maintenance_counts_where_it_ends_the_machine(gce, clock, event, source):
    """A live migration is no reason to stop."""
    gce.documents["maintenance-event"] = event
    notice = cloud_poller("gcp", gce.url, clock=clock).poll()
    assert (notice and notice.source) == source


def event(kind: str, *resources: str, not_before: str = "Tue, 14 Nov 2023 22:20:00 GMT", **more: object) -> dict:
    return {
        "EventId": "f020ba2e",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "EventStatus": "Scheduled",
        "NotBefore": not_before,
        **more,
    }


def test_azure_events_of_this_machine_that_end_it(azure, clock):
    """Of all machines' events the first that ends this one, whatever the case of its name; pauses do not count."""
    poller = cloud_poller("azure", azure.url, clock=clock)
    assert poller.poll() is None
    azure.events = [event("Freeze", "trainer_3"), event("Preempt", "trainer_2"), {"EventType": "Reboot"}, "odd"]
    assert poller.poll() is None
    azure.events += [
        event("Reboot", "trainer_2", "TRAINER_3", not_before="Tue, 14 Nov 2023 22:30:00 GMT"),
        event("Preempt", "Trainer_3", Description="Spot eviction"),
    ]
    notice = poller.poll()
    assert (notice.source, notice.deadline_unix) == ("azure preempt", 1_700_000_400.0)
    assert "Spot eviction" in notice.reason


@pytest.mark.parametrize("events", [3, {"EventType": "Preempt"}, [{"EventType": "Preempt", "Resources": [["x"]]}]])
def test_azure_events_of_another_shape_are_no_notice(azure, clock, events):
    """A document that is not as documented stops nobody."""
    azure.events = events
    assert cloud_poller("azure", azure.url, clock=clock).poll() is None


@pytest.mark.parametrize("more", [{"not_before": ""}, {"EventStatus": "Started"}])
def test_azure_event_that_has_started_ends_now(azure, clock, more):
    """Its time is over: there is nothing left to wait for."""
    azure.events = [event("Terminate", "Trainer_3", **more)]
    assert cloud_poller("azure", azure.url, clock=clock).poll().deadline_unix == clock.unix


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_dead_endpoint_is_said_once_and_never_raises(cloud, clock, capsys):
    """On a machine of another cloud nobody listens; Azure may be silent for its first two minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    poller = cloud_poller(cloud, url, clock=clock)
    assert poller.poll() is None
    assert bool(capsys.readouterr().err) == (cloud != "azure")
    clock.pass_s(151)
    assert poller.poll() is None
    assert poller.poll() is None
    said = capsys.readouterr().err
    assert len(said.splitlines()) == (cloud == "azure")


def test_a_silent_endpoint_costs_its_time_limit(capsys):
    """A service that accepts and says nothing does not hold the monitor up: this would never end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        poller = cloud_poller("gcp", f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        assert poller.poll() is None
    assert "does not answer (timed out)" in capsys.readouterr().err


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00\xff not http\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe<html>",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\n\r\n7",
    ],
)
def test_nonsense_is_no_notice(cloud, raw, clock, capsys):
    """Whatever answers there in another way is no reason to stop a training, and none to end the monitor."""
    with serving({"aws": Ec2, "gcp": Gce, "azure": Azure}[cloud]()) as service:
        service.raw = raw
        poller = cloud_poller(cloud, service.url, clock=clock)
        assert poller.poll() is None
        assert poller.poll() is None
    assert len(capsys.readouterr().err.splitlines()) <= 1


def test_gce_answers_at_once_when_it_is_preempted(gce, monkeypatch):
    """Of half a minute nothing is lost: the second question waits, and the change ends it."""
    monkeypatch.setattr(cloud_gcp, "WAIT_S", 60)
    poller = cloud_poller("gcp", gce.url)
    assert poller.poll() is None
    found: queue.Queue = queue.Queue()
    thread = threading.Thread(target=lambda: found.put(poller.poll()), daemon=True)
    thread.start()
    assert gce.waiting.wait(10)
    gce.documents["preempted"] = "TRUE"
    assert found.get(timeout=20).source == "gcp preempted"
    thread.join()


def test_gce_sees_a_change_between_two_questions(gce):
    """The question names what was answered last, so it does not wait for the next change."""
    poller = cloud_poller("gcp", gce.url)
    assert poller.poll() is None
    gce.documents["preempted"] = "TRUE"
    assert poller.poll().source == "gcp preempted"
    assert not gce.waiting.is_set()


def test_azure_events_are_never_approved(azure, clock):
    """Approving an event would give the machine away at once: only GET is ever sent."""
    poller = cloud_poller("azure", azure.url, clock=clock)
    azure.events = [event("Preempt", "Trainer_3")]
    assert poller.poll().deadline_unix == poller.poll().deadline_unix == 1_700_000_400.0
    assert {method for method, *_ in azure.asked} == {"GET"}
    assert azure.events[0]["EventStatus"] == "Scheduled"


@pytest.mark.parametrize("status", [403, 500, 503])
def test_ec2_statuses_that_are_no_answer_are_no_notice(ec2, clock, capsys, status):
    """Only 404 means: nothing of the kind. A service that is switched off (403) is said, and asked again."""
    ec2.refuse = status
    poller = cloud_poller("aws", ec2.url, clock=clock)
    assert poller.poll() is None
    assert poller.poll() is None
    assert capsys.readouterr().err.count(f"answers with {status}") == 1
    ec2.refuse = None
    ec2.documents[ACTION] = "{}"
    assert poller.poll().source == "aws spot"


def test_ec2_token_that_cannot_reach_a_container_is_explained(capsys):
    """The answer to the PUT is dropped by the network after one hop, which looks like silence."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert cloud_poller("aws", url, timeout_s=0.2).poll() is None
    assert "HttpPutResponseHopLimit" in capsys.readouterr().err


def test_a_service_that_breaks_down_takes_nothing_back(ec2, clock):
    """What it said last stands until it says otherwise."""
    poller = cloud_poller("aws", ec2.url, clock=clock)
    ec2.documents[ACTION] = "{}"
    notice = poller.poll()
    ec2.refuse = 503
    assert poller.poll() == notice
    ec2.refuse = None
    del ec2.documents[ACTION]
    assert poller.poll() is None


def test_no_proxy_is_used(gce, clock, monkeypatch):
    """A proxy of the environment would ask about itself."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    gce.documents["preempted"] = "TRUE"
    assert cloud_poller("gcp", gce.url, clock=clock).poll() is not None


def test_off_by_default_and_bad_values_are_named():
    """Without the setting nobody is asked; what is no cloud or no URL is refused before anything runs."""
    assert cloud_poller(Settings().cloud_notices, Settings().cloud_endpoint) is None
    assert Settings(cloud_notices=False).cloud_notices == "off"  # YAML reads `off` so
    assert (
        Settings(cloud_notices="AWS", cloud_endpoint="http://10.0.0.1:80/x/").cloud_endpoint == "http://10.0.0.1:80/x"
    )
    with pytest.raises(ConfigError, match=r"cloud_notices.*off, aws, gcp, azure.*ibm"):
        Settings(cloud_notices="ibm")
    for url in ("ftp://x", "169.254.169.254", "http://", "http://a b", "file:///etc/passwd"):
        with pytest.raises(ConfigError, match=r"cloud_endpoint.*URL"):
            Settings(cloud_endpoint=url)
        with pytest.raises(ConfigError, match="cloud_endpoint"):
            cloud_poller("aws", url)
    with pytest.raises(ConfigError, match="cloud_notices"):
        cloud_poller("ibm")


def test_pollers_need_no_torch():
    """The monitor asks, and the monitor is small."""
    code = "import sys, resilience_sdk.preemption.cloud; print([m for m in ('torch', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
