"""The console in a real Chromium: no request to another host, by keyboard, in both colour schemes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.console.test_console import HOSTILE, PAGES, Running, console, fill_typed, give_up
from tests.one_zookeeper import cluster

CHROMIUM = shutil.which("chromium")
CONTRAST_MIN = 4.5
"""WCAG 2.2, level AA, for text."""
CONTRASTS = """() => {
  const luminance = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((value) => value / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = [...document.body.querySelectorAll("*")]
    .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
  return texts.map((one) => {
    const [low, high] = [luminance(getComputedStyle(one).color), luminance(ground(one))].sort((a, b) => a - b);
    return [one.textContent.trim().slice(0, 40), (high + 0.05) / (low + 0.05)];
  });
}"""
"""Text and contrast of each element with text of its own."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shown() -> Iterator[Running]:
    with cluster() as one:
        one.create_topic("orders", 2)
        give_up(one)
        with one.producer() as producer:
            producer.send("orders", HOSTILE.encode(), HOSTILE.encode(), {"<b>": HOSTILE.encode()}).result(60)
        with one.consumer(group="etl", topics=["orders"], consumer_id="reader"), console(one) as running:
            yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


def test_no_page_asks_another_host_or_breaks_its_policy(shown: Running, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    for path in PAGES:
        page.goto(shown.url + path[1:])
    page.close()
    assert f"{shown.url}static/console.css" in asked
    assert [url for url in asked if not url.startswith(shown.url)] == []
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(shown: Running, browser: Any, scheme: Literal["light", "dark"]) -> None:
    page = browser.new_page(color_scheme=scheme)
    grounds = set()
    for path in (*PAGES, "/group?name=none"):
        page.goto(shown.url + path[1:])
        found = page.evaluate(CONTRASTS)
        assert len(found) > 5
        assert [one for one in found if one[1] < CONTRAST_MIN] == [], path
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    page.close()
    assert grounds == {"rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 28)"}


def test_the_keyboard_reaches_a_group(shown: Running, browser: Any) -> None:
    page = browser.new_page()
    page.goto(shown.url)

    def focus(text: str) -> None:
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent.trim()") == text:
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
                return
        pytest.fail(f"Tab does not reach {text}")

    focus("Skip to the content")
    focus("Groups")
    page.keyboard.press("Enter")
    page.wait_for_url("**/groups")
    focus("Skip to the content")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    focus("etl")
    page.keyboard.press("Enter")
    page.wait_for_url("**/group?name=etl")
    assert page.get_by_role("heading", level=1).text_content() == "Group etl"
    page.close()


def test_a_narrow_screen_scrolls_tables_only(shown: Running, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 700})
    for path in PAGES:
        page.goto(shown.url + path[1:])
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
    page.close()


def test_stored_bytes_are_one_key_away(shown: Running, browser: Any) -> None:
    fill_typed(shown.cluster)
    page = browser.new_page()
    page.goto(f"{shown.url}messages?name=trips")
    assert '"place": "<script>alert(1)</script>\\u202e\\u0007"' in page.locator("td pre").first.inner_text()
    stored = page.locator("details").first
    assert not stored.locator("pre").is_visible()
    stored.locator("summary").focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert stored.locator("pre").inner_text().startswith(r"\x00\x00\x00\x00\x01")
    assert [one for one in page.evaluate(CONTRASTS) if one[1] < CONTRAST_MIN] == []
    page.close()


def test_a_dead_letter_is_sent_again_by_keyboard(shown: Running, browser: Any) -> None:
    with console(shown.cluster, "--allow-changes") as changing:
        page = browser.new_page()
        page.goto(f"{changing.url}letters?name=failing")
        for words in ("Send all again", "Send again"):
            wanted = page.get_by_text(words, exact=True).first
            wanted.focus()
            with page.expect_navigation():
                page.keyboard.press("Enter")
        assert page.get_by_role("status").inner_text() == "1 letter was sent again."
        page.close()
