"""The metrics as Prometheus gets them: over HTTP and in a file, both read by its own parser."""

from __future__ import annotations

import contextlib
import socket
import stat
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import attrs
import needed
import pytest
from told_run import ToldRun

from resilience_sdk.telemetry.exporter import Worker
from resilience_sdk.telemetry.sinks.prometheus import ADDRESS_FILE, PrometheusServer, PrometheusTextfile

parser = needed.library("prometheus_client.parser", "prometheus")


@contextlib.contextmanager
def serving(run: ToldRun, token: str | None = None) -> Iterator[PrometheusServer]:
    """Serve what was told of a run."""
    sink = PrometheusServer(run.place(), ("127.0.0.1", 0), token)
    for line in run.lines():
        sink.digest(line)
    sink.open()
    sink.refresh()
    try:
        yield sink
    finally:
        sink.close()


def scrape(sink: PrometheusServer, token: str | None = None) -> str:
    """Ask as Prometheus does."""
    address = (sink.place.state_dir / ADDRESS_FILE).read_text()
    request = urllib.request.Request(f"http://{address}/metrics")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=20) as response:
        return response.read().decode()


def samples(text: str) -> dict[str, float]:
    """Return what Prometheus' parser finds, by name and labels but for run and node."""
    return {
        " ".join(
            (sample.name, *(value for key, value in sorted(sample.labels.items()) if key not in ("run", "node")))
        ): (sample.value)
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_counters_of_the_journal(run: ToldRun) -> None:
    """With run and node on every sample, and cumulative buckets."""
    with serving(run) as sink:
        text = scrape(sink)
    assert not (sink.place.state_dir / ADDRESS_FILE).exists()  # nobody is there any more
    found = samples(text)
    assert found["resilience_restarts_total"] == 1
    assert found["resilience_incidents_total network link_down hang"] == 1
    assert found["resilience_recovery_duration_seconds_count"] == 1
    assert found["resilience_recovery_duration_seconds_bucket 2.5"] == 0
    assert found["resilience_recovery_duration_seconds_bucket 5.0"] == 1
    assert found["resilience_recovery_duration_seconds_bucket +Inf"] == 1
    assert found["resilience_run_up"] == 1
    assert all('run="run"' in line and 'node="here"' in line for line in text.splitlines() if line[0] != "#")


def test_nobody_is_answered_before_the_journal_was_read(run: ToldRun) -> None:
    """A scrape that comes too soon waits: counters at 0 would be a reset, and count everything again."""
    sink = PrometheusServer(run.place(), ("127.0.0.1", 0), None)
    sink.open()
    scrapes: list[str] = []
    early = threading.Thread(target=lambda: scrapes.append(scrape(sink)))
    early.start()
    for line in run.lines():
        sink.digest(line)
    early.join(0.2)
    assert not scrapes
    sink.refresh()
    early.join(20)
    assert samples(scrapes[0])["resilience_restarts_total"] == 1
    sink.close()


def test_one_that_has_served_nobody_can_be_closed_and_opened_again(run: ToldRun) -> None:
    """As the worker does after each failure, whether the journal was read by then or not."""
    sink = PrometheusServer(run.place(), ("127.0.0.1", 0), None)
    for _ in range(2):
        sink.open()
        sink.close()
    sink.open()
    sink.refresh()
    sink.close()
    sink.open()
    assert "resilience_run_up" in samples(scrape(sink))
    sink.close()


def test_with_a_token_only_those_who_have_it_are_served(run: ToldRun) -> None:
    """A wrong one, and none, are refused."""
    with serving(run, token="s3cret") as sink:
        for wrong in (None, "other", "s3cret2"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                scrape(sink, wrong)
            with contextlib.closing(caught.value):
                assert caught.value.code == 401
        assert "resilience_restarts_total" in samples(scrape(sink, "s3cret"))


def test_a_client_that_says_nothing_keeps_nobody_from_scraping(run: ToldRun) -> None:
    """Every request has a thread of its own."""
    with serving(run) as sink:
        host, _, port = (sink.place.state_dir / ADDRESS_FILE).read_text().rpartition(":")
        with socket.create_connection((host, int(port))):
            assert "resilience_run_up" in samples(scrape(sink))


def test_a_client_that_goes_leaves_no_stack_on_the_screen(run: ToldRun, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard error is the job's."""
    with serving(run) as sink:
        address = sink._server.server_address
        with socket.create_connection(address[:2]) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
            client.sendall(b"GET /metrics HTTP/1.0\r\n")
        assert "resilience_run_up" in samples(scrape(sink))
        while any("process_request_thread" in thread.name for thread in threading.enumerate()):
            time.sleep(0.01)
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_does_not_end_the_serving(run: ToldRun) -> None:
    """The file that tells the address is a convenience; the port would stay taken by a server that nobody feeds."""
    place = run.place()
    (place.state_dir / ADDRESS_FILE).mkdir()  # nothing can be renamed to it
    sink = PrometheusServer(place, ("127.0.0.1", 0), None)
    sink.open()
    sink.refresh()
    port = sink._server.server_address[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
        assert response.status == 200
    sink.close()


def test_an_address_that_is_taken_is_an_error(run: ToldRun) -> None:
    """Which the worker tells and tries again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        sink = PrometheusServer(run.place(), ("127.0.0.1", taken.getsockname()[1]), None, port_free_within_s=0.0)
        with pytest.raises(OSError, match="in use"):
            sink.open()


def test_a_port_that_the_run_before_is_about_to_leave_is_waited_for(
    run: ToldRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """It stays until its last metrics were fetched: told in one line, and no failure."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        sink = PrometheusServer(run.place(), ("127.0.0.1", taken.getsockname()[1]), None, port_free_within_s=20.0)
        opening = threading.Thread(target=sink.open)
        sink.refresh()
        opening.start()
        shown = ""
        while not shown:
            shown += capfd.readouterr().err
    opening.join(20)
    assert "resilience_run_up" in samples(scrape(sink))
    sink.close()
    shown += capfd.readouterr().err
    assert shown.count("is taken, perhaps by a run that has just ended") == 1


def test_the_end_of_the_job_ends_the_wait_for_a_port(run: ToldRun, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody was served and nobody will be, so nothing is left over; that it failed is told."""
    failures: list[Exception] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        sink = PrometheusServer(run.place(), ("127.0.0.1", taken.getsockname()[1]), None, port_free_within_s=60.0)
        worker = Worker(
            sink,
            run.run_dir.journal,
            note_failure=lambda _, error: failures.append(error),
            note_recovery=lambda *_: pytest.fail("it was never well"),
        )
        worker.start()
        while "is taken" not in capfd.readouterr().err:
            time.sleep(0.001)
        assert failures == []
        worker.finish()
        assert worker.join(10)
    assert "in use" in str(failures)
    assert len(failures) == 1


def test_it_stays_until_the_end_was_fetched(run: ToldRun) -> None:
    """Else Prometheus could not tell a job that has ended from a node that has died."""
    with serving(run, token="s3cret") as sink:
        scrape(sink, "s3cret")
        sink.place.live.up = False
        staying = threading.Thread(target=sink.stay_until_fetched)
        staying.start()
        while not sink._visitors._is_over:
            time.sleep(0.001)
        with pytest.raises(urllib.error.HTTPError) as caught:
            scrape(sink, "guessed")
        caught.value.close()
        assert staying.is_alive()
        assert samples(scrape(sink, "s3cret"))["resilience_run_up"] == 0
        staying.join(20)
        assert not staying.is_alive()


def test_where_nobody_fetches_it_does_not_stay(run: ToldRun) -> None:
    """Neither where nobody ever came."""
    with serving(run) as sink:
        began = time.monotonic()
        sink.stay_until_fetched()
        assert time.monotonic() - began < 5.0


def test_another_exporters_address_is_not_removed(run: ToldRun) -> None:
    """That of the next job may have begun before this one has left."""
    with serving(run) as sink:
        (sink.place.state_dir / ADDRESS_FILE).write_text("127.0.0.1:1")
    assert (sink.place.state_dir / ADDRESS_FILE).read_text() == "127.0.0.1:1"


def test_the_textfile_is_whole_and_readable_for_the_node_exporter(run: ToldRun, tmp_path: Path) -> None:
    """One file per run; it says at the end that the run is over."""
    sink = PrometheusTextfile(run.place(), str(tmp_path / "textfiles"))
    for line in run.lines():
        sink.digest(line)
    sink.refresh()
    sink.place.live.up = False
    sink.refresh()
    (path,) = (tmp_path / "textfiles").iterdir()
    assert path.suffix == ".prom"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    found = samples(path.read_text())
    assert (found["resilience_run_up"], found["resilience_restarts_total"]) == (0, 1)


def test_two_runs_of_one_name_have_two_files(tmp_path: Path) -> None:
    """Their directories differ."""
    first, second = ToldRun.make(tmp_path / "a"), ToldRun.make(tmp_path / "b")
    paths = {PrometheusTextfile(run.place(), str(tmp_path)).path for run in (first, second)}
    assert len(paths) == 2


def test_two_nodes_of_a_run_have_two_files(run: ToldRun, tmp_path: Path) -> None:
    """They may share the directory: pods of one host, or one on a shared file system."""
    places = [attrs.evolve(run.place(), host=name) for name in ("trainer-0", "trainer-1", "trainer_1", "n" * 300)]
    paths = {PrometheusTextfile(place, str(tmp_path)).path for place in places}
    assert len(paths) == 4
    assert any("trainer_0" in path.name for path in paths)
    assert all(len(path.name) < 220 for path in paths)  # a library adds to it while it writes
