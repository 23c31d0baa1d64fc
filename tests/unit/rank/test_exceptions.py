"""What is written down of an exception: its own words and frames, wherever it was raised."""

import concurrent.futures
import json
import multiprocessing
import socket
import sys
import threading

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from resilience_sdk.attribution.exceptions import match_exception
from resilience_sdk.attribution.exits import failed_resource
from resilience_sdk.launcher.attempt import exception_from_torch
from resilience_sdk.rank.exceptions import chain_thread_hook, describe, write_error_file


def fails(item):
    raise ValueError(f"sample {item} is too long")


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        fails(index)


def caught(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_exception_is_described_from_the_inside_out():
    """Type, message, frames, the innermost frame of the user, the step, and the text that Python prints."""
    record = describe(caught(fails, 3), 7)
    assert (record["type"], record["message"], record["step"]) == ("ValueError", "sample 3 is too long", 7)
    assert [frame.split()[-1] for frame in record["frames"]] == ["fails", "caught"]
    assert record["user_frame"] == record["frames"][0]
    assert record["traceback"].endswith("ValueError: sample 3 is too long\n")


def test_what_a_dataloader_worker_raised_has_the_workers_words_and_frames():
    """Torch raises it again with the worker's traceback as text; the place that failed is the user's frame."""
    error = caught(list, DataLoader(Samples(), num_workers=1, multiprocessing_context="fork"))
    record = describe(error, None)
    assert record["message"].splitlines()[0] == (
        "sample 0 is too long (Caught ValueError in DataLoader worker process 0)"
    )
    assert record["frames"][0].endswith(" fails")
    assert record["user_frame"].endswith(" fails")
    assert match_exception(record).cause == "dataloader_exception"


def test_what_a_process_of_a_pool_raised_has_the_frames_from_there():
    """Pools bring the traceback along as the cause."""
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
        error = caught(pool.submit(fails, 5).result)
    assert describe(error, None)["user_frame"].endswith(" fails")


def test_a_very_long_traceback_keeps_both_ends():
    """The file stays small; the beginning and the exception are there."""

    def deep(levels):
        if not levels:
            fails("x" * 20_000)
        (deep if levels % 2 else other)(levels - 1)

    def other(levels):
        deep(levels)

    record = describe(caught(deep, 300), None)
    assert len(record["traceback"]) < 17_000
    assert len(record["message"]) == 4000
    assert record["traceback"].startswith("Traceback")
    assert len(record["frames"]) == 100


def test_the_error_file_is_the_one_that_torch_writes_and_reads(tmp_path, monkeypatch):
    """torchrun's reader takes it, and so does ours; `@record` was first if it is there already."""
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file(caught(fails, 1))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert "sample 1 is too long" in failure.message["message"]
    assert exception_from_torch(path)["user_frame"].endswith(" fails")
    write_error_file(caught(fails, 2))
    assert "sample 1" in json.loads(path.read_text())["message"]["message"]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_an_end_on_purpose_leaves_no_error_file(tmp_path, monkeypatch, error):
    """As with `@record`."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error_file(error)
    assert not list(tmp_path.iterdir())


def test_who_only_misses_a_peer_is_later_than_who_failed_in_the_same_second(tmp_path, monkeypatch):
    """torchrun calls the earliest whole second the root cause, and the lower rank where two are equal."""
    monkeypatch.setattr("resilience_sdk.rank.exceptions.time.time", lambda: 1000.25)
    stamps = []
    for name, error in (("a", ValueError("x")), ("b", RuntimeError("[pair.cc:553] Connection closed by peer [::1]:1"))):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / name))
        write_error_file(error)
        stamps.append(json.loads((tmp_path / name).read_text())["message"]["extraInfo"]["timestamp"])
    assert stamps == ["1000", "1001"]


def test_a_thread_that_raises_is_recorded_and_still_told_of(monkeypatch):
    """Who handled such exceptions before still does; a thread that leaves by SystemExit has not failed.

    The hook is the whole process's: threads that another test has left behind are none of this one's business.
    """
    told, recorded = [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append((args.exc_type, args.thread.name)))
    chain_thread_hook(lambda error, name: recorded.append((str(error), name)))
    for name, target in (("prefetch", lambda: fails(1)), ("leaver", lambda: sys.exit(1))):
        thread = threading.Thread(target=target, name=name)
        thread.start()
        thread.join()
    assert [said for said in recorded if said[1] in ("prefetch", "leaver")] == [("sample 1 is too long", "prefetch")]
    ours = [said for said in told if said[1] in ("prefetch", "leaver")]
    assert ours == [(ValueError, "prefetch"), (SystemExit, "leaver")]


def _spawned(number):
    """Fail in one of the processes, from another error."""
    try:
        {}["missing"]
    except KeyError as error:
        if number == 1:
            raise ValueError("inner fails\nin two lines") from error
    threading.Event().wait()


def test_what_a_spawned_process_raised_is_told_as_it_is():
    """Its type, its words, its line and which process it was, in place of the text that its parent got."""
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as raised:
        torch.multiprocessing.start_processes(_spawned, nprocs=2, start_method="fork")
    told = describe(raised.value, None)
    assert told["type"] == "ValueError"
    assert told["message"].startswith("inner fails\nin two lines (in process 1 of torch.multiprocessing.spawn)")
    assert told["user_frame"].endswith(" _spawned")
    assert __file__ in told["user_frame"]


def test_a_name_that_does_not_resolve_is_named():
    """The resolver's own words leave it out. It is not waited for: a wrong one never resolves."""
    try:
        socket.create_connection(("data.example.invalid", 80), timeout=5)
    except socket.gaierror as error:
        told = describe(error, 3)
    assert told["message"].endswith(" (asked for 'data.example.invalid')")
    assert failed_resource("dns_failure", [told["message"]]).name is None
