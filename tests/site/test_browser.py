"""The site in a real browser: headless Chromium, as `make test-site` runs it.

Set TESTS_OF_KVDOCK_SITE_SCREENSHOTS to a folder to keep a picture of every page, and
TESTS_OF_KVDOCK_SITE_PAGES to "few" to look at three of them.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

webdriver = pytest.importorskip("selenium.webdriver")

pytestmark = pytest.mark.slow

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
DESKTOP, PHONE = (1280, 900), (390, 844)
FEW = ("index.html", "how-to/vllm.html", "reference/benchmarks.html")
LEAST_CONTRAST, LEAST_CONTRAST_OF_LARGE = 4.5, 3.0
"""WCAG 2.1, level AA."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

OVERFLOW = """
const wide = document.documentElement.scrollWidth - arguments[0];
return wide > 1 ? wide : 0;
"""

CONTRAST = """
const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const channel = (value) => {
  const share = value / 255;
  return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
};
const light = ([r, g, b]) =>
  0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const over = ([r, g, b, a = 1], [x, y, z]) =>
  [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a)];
const behind = (node) => {
  const layers = [];
  for (let one = node; one; one = one.parentElement) {
    layers.push(parts(getComputedStyle(one).backgroundColor));
  }
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const found = {};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.checkVisibility({
    opacityProperty: true, visibilityProperty: true})) continue;
  if (!node.getClientRects().length || node.closest("svg, script, style")) continue;
  const style = getComputedStyle(node);
  const ground = behind(node);
  const pair = [light(over(parts(style.color), ground)), light(ground)].sort();
  const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
  if (ratio < (large ? arguments[1] : arguments[0])) {
    const key = `${node.tagName.toLowerCase()}.${node.className} ${style.color}`;
    found[key] = `${ratio.toFixed(2)} ${walker.currentNode.data.trim().slice(0, 40)}`;
  }
}
return found;
"""


class Quiet(SimpleHTTPRequestHandler):
    """Serve files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        del format, args


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the built site is served, on loopback."""
    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("install Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    service = webdriver.ChromeService(executable_path=DRIVER)
    started = webdriver.Chrome(options=options, service=service)
    yield started
    started.quit()


def page_names(site: Path) -> list[str]:
    """Return the pages that are looked at: of the decisions, the index and one."""
    names = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
    if os.environ.get("TESTS_OF_KVDOCK_SITE_PAGES") == "few":
        return [one for one in names if one in FEW]
    decisions = [one for one in names if one.startswith("decisions/0")]
    return [one for one in names if one not in decisions[1:]]


def show(browser: Any, size: tuple[int, int], *, dark: bool) -> None:
    """Make the window as wide as a device, and choose its colours."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {**metrics, "mobile": width < 500}
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def picture(browser: Any, name: str) -> None:
    folder = os.environ.get("TESTS_OF_KVDOCK_SITE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(f"{folder}/{name}.png")


def requests(browser: Any) -> Iterator[tuple[str, int]]:
    """Yield the address and the status of everything that was asked for."""
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        match message["method"]:
            case "Network.requestWillBeSent":
                yield message["params"]["request"]["url"], 0
            case "Network.responseReceived":
                response = message["params"]["response"]
                yield response["url"], int(response["status"])


@pytest.mark.parametrize(
    ("size", "dark"), [(DESKTOP, False), (PHONE, False), (DESKTOP, True), (PHONE, True)]
)
def test_pages_render_without_errors_fit_and_are_readable(
    browser: Any, address: str, site: Path, size: tuple[int, int], *, dark: bool
) -> None:
    show(browser, size, dark=dark)
    wrong: dict[str, object] = {}
    here = urlsplit(address).netloc
    for name in page_names(site):
        browser.get(f"{address}/{name}")
        kind = f"{name.removesuffix('.html').replace('/', '_')}-{size[0]}"
        picture(browser, f"{kind}-dark" if dark else kind)
        asked = list(requests(browser))
        found = {
            "log": [
                one["message"]
                for one in browser.get_log("browser")
                # Chromium's own pages write there too.
                if "favicon" not in one["message"]
                and not one["message"].startswith("chrome")
            ],
            "too wide": browser.execute_script(OVERFLOW, size[0]),
            "elsewhere": [
                url
                for url, _ in asked
                if urlsplit(url).scheme in ("http", "https", "ws", "wss")
                and urlsplit(url).netloc != here
            ],
            "failed": [
                url for url, status in asked if status >= 400 and "favicon" not in url
            ],
            "hard to read": browser.execute_script(
                CONTRAST, LEAST_CONTRAST, LEAST_CONTRAST_OF_LARGE
            ),
            "without heading": name != "search.html"
            and not browser.find_elements("css selector", "h1"),
        }
        bad = {what: one for what, one in found.items() if one}
        if bad:
            wrong[name] = bad
    assert not wrong, json.dumps(wrong, indent=1)


def test_text_that_is_hard_to_read_and_pages_that_are_too_wide_are_noticed(
    browser: Any, address: str
) -> None:
    show(browser, PHONE, dark=False)
    browser.get(f"{address}/index.html")
    browser.execute_script(
        "const one = document.querySelector('article p');"
        "one.style.color = '#999'; one.style.backgroundColor = '#bbb';"
        "one.style.width = '800px'; document.body.style.width = '900px';"
    )
    limits = LEAST_CONTRAST, LEAST_CONTRAST_OF_LARGE
    assert len(browser.execute_script(CONTRAST, *limits)) == 1
    assert browser.execute_script(OVERFLOW, PHONE[0])


def test_pictures_are_loaded(browser: Any, address: str) -> None:
    browser.get(f"{address}/index.html")
    widths = browser.execute_script(
        "return [...document.images].map(one => one.naturalWidth)"
    )
    assert widths
    assert all(widths)


def test_the_search_finds_split_heads(browser: Any, address: str) -> None:
    WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait  # noqa: N806 - a class

    show(browser, DESKTOP, dark=False)
    browser.get(f"{address}/search.html?q=split+heads")
    # Results are added one by one, and the list says when it is whole.
    WebDriverWait(browser, 120).until(
        lambda shown: (
            shown.find_elements("css selector", "#search-results .search-summary")
            and "found" in shown.find_element("css selector", ".search-summary").text
        )
    )
    picture(browser, "search-results")
    found = browser.find_elements("css selector", "#search-results li a")
    titles = [one.text for one in found]
    assert "Compatibility" in titles, titles


def test_the_pages_work_from_a_folder(browser: Any, site: Path) -> None:
    show(browser, DESKTOP, dark=False)
    browser.get((site / "index.html").as_uri())
    link = browser.find_element("link text", "troubleshooting")
    # A reader scrolls as well: what stays at the window's edge lies over the rest.
    where = {"block": "center", "behavior": "instant"}
    browser.execute_script("arguments[0].scrollIntoView(arguments[1])", link, where)
    link.click()
    assert browser.find_element("css selector", "h1").text.startswith("Troubleshooting")
