"""A real browser for pages: Debian's chromium without a screen, which is told what to do and asked what it saw."""

import base64
import json
import os
from contextlib import contextmanager

import pytest
from needed import fetched, library, program

# Keys as a driver is told of them.
TAB, ENTER, SPACE, ESCAPE, DOWN = "\ue004", "\ue007", "\ue00d", "\ue00c", "\ue015"
_REQUESTS = ("requestWillBeSent", "loadingFailed")


class Browser:
    """A browser that is at one page at a time; `driver` is selenium's."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, url, *, width=1280, dark=False, media=""):
        """Go to a page, on a screen of that width; what was seen before is forgotten."""
        self.look_like(dark=dark, media=media)
        self.resize(width)
        self.driver.get("about:blank")
        self.requests()
        self.complaints()
        self.driver.get(url)

    def look_like(self, *, dark=False, media=""):
        """Have a system that is light or dark, or a printer."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def resize(self, width, height=1000):
        """Have a screen of that size."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def command(self, name, **arguments):
        """Ask the browser itself, in the protocol of its developer tools."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def ask(self, script, *arguments):
        """Return what a function body of JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, script, *arguments):
        """Wait until a function body of JavaScript returns something true: an event comes after what has caused it."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30, 0.02).until(lambda _: self.ask(script, *arguments), script)

    def barriers(self, *impacts):
        """Return what axe finds of these impacts on the page: rule, help and the first elements."""
        # The policy of a page lets no script of others in, but what the driver brings.
        self.ask(fetched("TEST_AXE", "axe.min.js of axe-core").read_text(encoding="utf-8"))
        found = self.driver.execute_async_script("const done = arguments[0]; axe.run(document).then(done)")
        return [
            (one["id"], one["impact"], one["help"], [node["html"][:150] for node in one["nodes"][:3]])
            for one in found["violations"]
            if one["impact"] in impacts
        ]

    def press(self, *keys):
        """Press keys, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def point_at(self, element, right=0, down=0):
        """Move the pointer to the middle of an element, or beside it."""
        from selenium.webdriver.common.action_chains import ActionChains

        self.ask("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        ActionChains(self.driver).move_to_element_with_offset(element, right, down).perform()

    def click(self, element):
        """Click on what is in the middle of the screen then, and so below no bar."""
        from selenium.webdriver.common.action_chains import ActionChains

        self.point_at(element)
        ActionChains(self.driver).click().perform()

    def find(self, selector):
        """Return the first element."""
        from selenium.webdriver.common.by import By

        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def requests(self):
        """Return the addresses that were asked for since the last call, but for those that a policy has refused."""
        told = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        by_method = {name: [one["params"] for one in told if one["method"] == f"Network.{name}"] for name in _REQUESTS}
        refused = {one["requestId"] for one in by_method["loadingFailed"] if one.get("blockedReason") == "csp"}
        return [one["request"]["url"] for one in by_method["requestWillBeSent"] if one["requestId"] not in refused]

    def complaints(self):
        """Return what the console said since the last call: errors, warnings, and what a policy has refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def picture(self, path):
        """Write what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def started(tmp_path):
    """Start a browser with a profile of its own, and end it."""
    webdriver = library("selenium.webdriver", "test")
    binary, driver = program("chromium", "chromium"), program("chromedriver", "chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    words = ["--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    words.append("--force-prefers-reduced-motion")  # a page that scrolls softly moves away below a click
    words += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    if os.geteuid() == 0:
        words.append("--no-sandbox")  # as root it has none
    for word in words:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(driver)
    chrome = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser for the tests of a module."""
    with started(tmp_path_factory.mktemp("browser")) as one:
        yield one
