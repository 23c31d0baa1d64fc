"""The application through a client: what each address answers, to whom, and with which headers."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import uvicorn
from dashboard_fleet import HOSTILE, fleet, hostile, odd
from dashboards import dashboard, links
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from told_fleet import ToldFleetRun

from resilience_sdk.dashboard import app, pages
from resilience_sdk.dashboard.access import Hosts
from resilience_sdk.dashboard.pages import number, percent
from resilience_sdk.dashboard.runs import FoundRuns, RunBook

TOKEN = "f00-secret"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of every kind."""
    folder = tmp_path_factory.mktemp("runs")
    fleet(folder, 18)
    odd(folder)
    for index, text in enumerate(HOSTILE):
        hostile(folder, text, index)
    return folder


class _Elements(HTMLParser):
    """Every element of a page, with its attributes; and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_answer_has_its_headers(runs: Path) -> None:
    """The list, a run, a file, a download, what is not there and what is refused."""
    with dashboard(runs) as client:
        run = links(client.get("/").text)[0]
        name = run.rpartition("/")[2]
        for address, status in (
            ("/", 200), (run, 200), (f"/report/{name}.html", 200), ("/static/list.css", 200), ("/static/page.js", 200),
            ("/nothing", 404), ("/run/none", 404), ("/run/none/events", 404), ("/report/none.html", 404),
            (f"/report/{name}.pdf", 404), ("/static/none.css", 404), ("/docs", 404), ("/openapi.json", 404),
        ):  # fmt: skip
            answer = client.get(address)
            assert answer.status_code == status, address
            headers = answer.headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy.replace("'", "").lower()
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert "server" not in headers
            assert "access-control-allow-origin" not in headers
        assert client.head("/").status_code == 200
        assert client.head("/").content == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "x"])
def test_nothing_but_looking_is_answered(runs: Path, method: str) -> None:
    """Whatever the address."""
    with dashboard(runs) as client:
        for address in ("/", "/run/x", "/events", "/static/list.css"):
            answer = client.request(method, address)
            assert answer.status_code == 405
            assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost:9000", True), ("LOCALHOST", True), ("127.0.0.1:1", True), ("[::1]:8484", True), ("10.1.2.3", True),
        ("runs.example:80", True), ("Runs.Example.", True),
        ("evil.example", False), ("localhost.evil.example", False), ("127.0.0.1.nip.io", False), ("", False),
        ("evil.example:8484", False), ("[evil]", False), ("0x7f.1", False),
    ],
)  # fmt: skip
def test_a_name_that_anybody_may_point_here_is_refused(runs: Path, host: str, is_ours: bool) -> None:
    """DNS rebinding: the page of another name is told nothing, also not by its events; plain addresses are nobody's."""
    with dashboard(runs, hosts=Hosts.of("runs.example")) as client:
        for address in ("/", "/events", "/static/list.js") if not is_ours else ("/",):
            assert client.get(address, headers={"Host": host}).status_code == (200 if is_ours else 421)


def test_a_token_is_asked_of_everybody(runs: Path) -> None:
    """As a header, or once in the address; then it is a cookie of another value, and the address is without it."""
    with dashboard(runs, token=TOKEN) as client:
        for address in ("/", "/run/x", "/run/x/events", "/events", "/static", "/report/x.html", "/nothing"):
            answer = client.get(address)
            assert answer.status_code == 401, address
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "content-security-policy" in answer.headers
        assert client.get("/static/list.css").status_code == 200  # of this package, for the page that asks
        for wrong in ("Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xe9", TOKEN):
            assert client.get("/", headers={"Authorization": wrong.encode("latin-1")}).status_code == 401
        assert client.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/?token=wrong").status_code == 401
        assert client.get("/", headers={"Cookie": "a=b; =; \xff".encode("latin-1")}).status_code == 401

        answer = client.get(f"/run/x?q=a%26b&token={TOKEN}&sort=-step")
        assert (answer.status_code, answer.headers["location"]) == (303, "/run/x?q=a%26b&sort=-step")
        cookie = answer.headers["set-cookie"]
        assert cookie.endswith("; HttpOnly; SameSite=Strict; Path=/")
        assert TOKEN not in cookie
        assert client.get("/").status_code == 200  # the client keeps it
        among_others = f'_xsrf="a\xff b"; {{"x": 1}}; {cookie.partition(";")[0]}; z'.encode("latin-1")
        client.cookies.clear()
        assert client.get("/").status_code == 401
        assert client.get("/", headers={"Cookie": among_others}).status_code == 200
        client.get(f"/?token={TOKEN}")
        again = client.get(f"/?token={TOKEN}")
        assert (again.status_code, again.headers["location"]) == (303, "/")


@pytest.mark.parametrize("path", ["//evil.example", "/\\evil.example", "///evil.example/x", "/%2F%2Fevil.example"])
def test_a_redirect_stays_here(runs: Path, path: str) -> None:
    """Whatever path comes with the token."""
    with dashboard(runs, token=TOKEN) as client:
        answer = client.get(f"http://127.0.0.1:8484{path}?token={TOKEN}")
        assert answer.status_code == 303
        assert re.match(r"/[^/\\]", answer.headers["location"])


def test_a_token_beside_another_one_is_not_mixed_up(runs: Path) -> None:
    """Cookies know no port: two dashboards of one host have cookies of different names."""
    with dashboard(runs, token=TOKEN) as one, dashboard(runs, token="other") as other:
        names = [client.get(f"/?token={token}").headers["set-cookie"].partition("=")[0]
                 for client, token in ((one, TOKEN), (other, "other"))]  # fmt: skip
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    "address",
    ["/run/..%2f", "/run/../../etc/passwd", "/run/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/run/%00", "/static/../app.py",
     "/static/%2e%2e%2fapp.py", "/static/..%5capp.py", "/report/%2e%2e%2fx.html", "/report/.html", "/run/%ff%fe"],
)  # fmt: skip
def test_no_address_is_a_path(runs: Path, address: str) -> None:
    """Names of runs and files are looked up, and never opened."""
    with dashboard(runs) as client:
        answer = client.get(f"http://127.0.0.1:8484{address}")
        assert answer.status_code == 404
        assert "root:" not in answer.text
        assert "import" not in answer.text


def test_every_run_has_a_page_and_a_file(runs: Path) -> None:
    """Also one that is torn, empty, of another version, or full of hostile texts."""
    with dashboard(runs) as client:
        page = client.get("/").text
        assert len(links(page)) == 18 + 5 + len(HOSTILE)
        for address in links(page):
            answer = client.get(address)
            assert answer.status_code == 200, address
            assert '<meta name="seen"' in answer.text
            file = client.get(f"/report/{address.rpartition('/')[2]}.html")
            assert file.status_code == 200
            assert file.headers["content-disposition"].startswith('attachment; filename="report-')
            assert "EventSource" not in file.text


def test_hostile_texts_stay_texts(runs: Path) -> None:
    """No element, attribute or address of the pages comes from a job; the texts are there, as texts."""
    with dashboard(runs) as client:
        page = client.get("/").text
        for shown in [page, *(client.get(address).text for address in links(page))]:
            _is_ours(shown)
        assert "<script>document.title=" in _Elements(page).text


@given(name=st.text(min_size=1, max_size=30), text=st.text(max_size=60))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_run_is_called(tmp_path_factory: pytest.TempPathFactory, name: str, text: str) -> None:
    """Its row and its page are well formed, and hold no element that is not ours."""
    folder = tmp_path_factory.mktemp("any")
    name = name.replace("/", "").replace("\0", "").encode("utf-8", "replace").decode().strip(". ") or "x"
    hostile(folder, text, 0)
    (folder / "0-").exists()
    ToldFleetRun.make(folder / f"r{name}", ["n"]).start()
    with dashboard(folder) as client:
        page = client.get("/").text
        assert len(links(page)) == 2
        for shown in [page, *(client.get(address).text for address in links(page))]:
            _is_ours(shown)


def _is_ours(page: str) -> None:
    """Fail where a page has an element or attribute that could do something, and is not one of ours."""
    for tag, attributes in _Elements(page).found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        assert tag not in ("img", "iframe", "object", "embed", "base", "audio", "video", "foreignobject"), tag
        if tag == "script":
            assert attributes.get("src") in (None, "/static/page.js", "/static/live.js", "/static/list.js")
        for name in ("href", "src", "action", "xlink:href"):
            address = attributes.get(name)
            assert address is None or address.startswith(("/", "#", "?", "data:")), (tag, attributes)
            assert not (address or "").startswith("//")


def test_a_page_knows_the_sums_of_what_stands_in_it(runs: Path) -> None:
    """The policy allows the style and scripts of a report by their sums, and none of them is left over."""
    with dashboard(runs) as client:
        address = links(client.get("/").text)[0]
        answer = client.get(address)
        policy = answer.headers["content-security-policy"]
        inline = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
        assert len(inline) == policy.partition("script-src")[2].partition(";")[0].count("sha256-") == 2
        sums = set(re.findall(r"'sha256-[^']+'", policy))
        own = answer.text.partition('http-equiv="Content-Security-Policy" content="')[2].partition('"')[0]
        assert set(re.findall(r"sha256-[^'&]+", own)) == {one.strip("'") for one in sums}


def test_a_run_that_was_removed_has_no_page_any_more(tmp_path: Path) -> None:
    """Nor events or a file; its row goes with the next look."""
    (path,) = fleet(tmp_path, 1)
    with dashboard(tmp_path) as client:
        (address,) = links(client.get("/").text)
        assert client.get(address).status_code == 200
        path.rename(tmp_path.parent / "elsewhere")
        for gone in (address, f"{address}/events", f"/report/{address.rpartition('/')[2]}.html"):
            assert client.get(gone).status_code == 404


def test_a_page_that_cannot_be_made_says_so(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the headers of every page, and once on the screen of whoever serves it."""

    def fail(*_: object, **__: object) -> None:
        raise LookupError("<b>a mistake of ours</b>")

    with dashboard(runs, raises=False) as client:
        address = links(client.get("/").text)[0]
        monkeypatch.setattr(pages, "render_page", fail)
        for _ in range(2):
            answer = client.get(address)
            assert answer.status_code == 500
            assert "LookupError: &lt;b&gt;a mistake of ours" in answer.text
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert client.get("/").status_code == 200
    assert capfd.readouterr().err.count("a mistake of ours") == 1


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    """And one that is not there yet; the first run appears by itself."""
    for folder in (tmp_path, tmp_path / "later"):
        with dashboard(folder) as client:
            page = client.get("/").text
            assert "No run yet" in page
            assert links(page) == []
            assert client.get("/run/x").status_code == 404


@pytest.mark.parametrize(
    ("share", "told"), [(None, "\u2013"), (0.0, "0 %"), (0.996, "99 %"), (1.0, "100 %"), (0.994, "99 %")]
)
def test_only_the_whole_is_a_hundred_per_cent(share: float | None, told: str) -> None:
    """A share is rounded, but not up to all of it."""
    assert percent(share) == told


def test_numbers_have_their_thousands_apart() -> None:
    """And what is no number of steps has none."""
    assert [number(value) for value in (None, 7, 12345678, 10**40)] == ["\u2013", "7", "12\u202f345\u202f678", "\u2013"]


_ASK = b"GET /static/list.css HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def connections(folder: Path) -> Iterator[socket.socket]:
    """Serve at a real socket in the block; yields a connection to it."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(app.server_config(app.Dashboard(RunBook(FoundRuns([str(folder)])))))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        with socket.create_connection(listening.getsockname(), timeout=20) as one:
            yield one
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def is_cut(one: socket.socket) -> bool:
    """Read what comes, to the end of the connection; False where that does not come."""
    try:
        while one.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("text", [b"", _ASK[:20], _ASK[:-2]])
def test_who_does_not_ask_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Else some hundred connections that say nothing would keep everybody out."""
    monkeypatch.setattr(app, "_ASK_WITHIN_S", 0.2)
    with connections(tmp_path) as one:
        one.sendall(text)
        assert is_cut(one)


def test_who_asks_again_and_does_not_come_to_an_end_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who was answered before, too; and no byte now and then buys more time."""
    monkeypatch.setattr(app, "_ASK_WITHIN_S", 0.2)
    with connections(tmp_path) as one:
        one.sendall(_ASK)
        assert one.recv(65536).startswith(b"HTTP/1.1 200")
        with contextlib.suppress(OSError):
            for _ in range(20):
                one.sendall(b"G")
                time.sleep(0.05)
        assert is_cut(one)


def test_who_was_answered_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open page is not cut: its answer goes on."""
    monkeypatch.setattr(app, "_ASK_WITHIN_S", 0.05)
    with connections(tmp_path) as one:
        one.sendall(_ASK.replace(b"/static/list.css", b"/events"))
        one.settimeout(0.5)
        assert not is_cut(one)
