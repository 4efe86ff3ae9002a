"""The page in a real browser, headless."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from knnper.client.service.files import encode_png
from knnper.client.service.tokens import add_token
from tests.client.service import small_service
from tests.client.service.small_service import (
    CLASSES,
    FEATURES,
    TOKEN,
    SmallServed,
    asking,
    small_served,
    some_inputs,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with playwright.sync_playwright() as started:
        # Chromium's sandbox does not start for root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(60_000)
    yield page
    context.close()


@contextlib.contextmanager
def opened(page: "Page", served: SmallServed, **given: Any) -> Iterator[None]:
    """Open the page; require that no script fails and nothing is from elsewhere."""
    wrong: list[str] = []
    with asking(served, **given) as client:
        address = str(client.base_url).rstrip("/")

        def look(request: "Request") -> None:
            if not request.url.startswith((address, "blob:", "data:")):
                wrong.append(f"from elsewhere: {request.url}")

        def read(message: "ConsoleMessage") -> None:
            if "Content Security Policy" in message.text:
                wrong.append(message.text)

        page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
        page.on("request", look)
        page.on("console", read)
        page.goto(address)
        yield
    assert wrong == []


def log_in(page: "Page", token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")


def choose(page: "Page", folder: Path, served: SmallServed) -> None:
    """Choose an image on the page."""
    path = folder / "digit.png"
    path.write_bytes(encode_png(some_inputs(1, served.model.spec, seed=4)[0].numpy()))
    # As a person: not before the page says that it takes images.
    page.locator("#drop").wait_for()
    page.get_by_label("Choose an image").set_input_files(path)


def teach(page: "Page", label: str) -> None:
    page.get_by_label("It really is").select_option(label=label)
    page.get_by_role("button", name="Remember it").click()


def test_a_person_sees_a_prediction_adds_an_example_and_takes_it_back(
    tmp_path: Path, page: "Page"
) -> None:
    served = small_served(tmp_path / "store")
    with opened(page, served):
        page.get_by_role("heading", name="Welcome").wait_for()
        hidden = page.locator("#token-problem, #error, #work")
        assert not hidden.locator("visible=true").count()
        log_in(page, "not the token that it is")
        page.get_by_text("is not known").wait_for()
        log_in(page, TOKEN)
        page.get_by_role("heading", name="site-a").wait_for()
        facts = page.locator("#facts").inner_text()
        choose(page, tmp_path, served)
        page.locator("#neighbors img").nth(2).wait_for()
        page.wait_for_function(
            "[...document.querySelectorAll('#neighbors img')]"
            ".every(one => one.complete && one.naturalWidth === 8)"
        )
        expected = served.predict(some_inputs(1, seed=4))
        answer = page.locator("#answer").inner_text()
        rows = page.locator("#bars tbody tr").count()
        names = page.locator("#neighbors").inner_text()
        teach(page, "eel")
        page.get_by_text("Remembered as eel, example 10").wait_for()
        first = page.locator("#neighbors li").first.inner_text()
        stored = page.locator("#facts").inner_text()
        page.get_by_role("button", name="Take back eel, example 10").click()
        page.get_by_text("Taken back: eel, example 10").wait_for()
        left = page.locator("#neighbors").inner_text()
        assert page.locator("#remembered li").count() == 0
        assert 10 not in served.store.contents().ids
    assert "example 10" not in left
    assert answer == CLASSES[int(expected.labels[0])]
    assert rows == len(CLASSES)
    for known in ("9", "0.50", "60.0 %", "70.0 %", "80.0 %"):
        assert known in facts
    assert all(name in names for name in expected.vote.neighbors.names[0] if name)
    assert "eel" in first
    assert "example 10" in first
    assert "10" in stored


def test_a_token_with_few_scopes_sees_and_is_asked_for_no_more(
    tmp_path: Path, page: "Page"
) -> None:
    served = small_served(tmp_path / "store")
    token = add_token(tmp_path, "tablet", ["predict"])
    statuses = list[int]()
    page.on("response", lambda answer: statuses.append(answer.status))
    with opened(page, served, state=tmp_path):
        log_in(page, token)
        page.get_by_text("take examples back (delete)").wait_for()
        choose(page, tmp_path, served)
        page.locator("#answer").get_by_text(re.compile("|".join(CLASSES))).wait_for()
        hidden = [
            page.locator(f"#{element}").is_hidden()
            for element in ("bars", "teach", "why")
        ]
        page.get_by_role("button", name="Use another token").click()
        log_in(page, TOKEN)
        page.locator("#facts").get_by_text("stored examples").wait_for()
        page.locator("#neighbors img").nth(2).wait_for()
    assert (403 in statuses, hidden) == (False, [True, True, True])


def test_what_others_wrote_is_shown_as_text(
    tmp_path: Path, page: "Page", monkeypatch: pytest.MonkeyPatch
) -> None:
    markup = "<img src=x onerror=\"document.title='run'\">"
    monkeypatch.setattr(small_service, "CLASSES", (markup, "<b>dog</b>", "eel"))
    served = small_served(tmp_path / "store", count=0)
    served.add(some_inputs(1), torch.tensor([0]), [f"name {markup}"])
    with opened(page, served, token=None):
        choose(page, tmp_path, served)
        page.locator("#neighbors li").first.wait_for()
        teach(page, markup)
        page.get_by_text(f"Remembered as {markup}").wait_for()
        shown = page.locator("#neighbors").inner_text()
        title, marks = page.title(), page.locator("#bars b, #work img[src=x]").count()
    assert f"name {markup}" in shown
    assert marks == 0
    assert title.startswith("site-a")


@pytest.mark.slow
def test_the_token_is_kept_for_the_session_only(
    tmp_path: Path, page: "Page", browser: "Browser"
) -> None:
    with opened(page, small_served(tmp_path / "store")):
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        page.get_by_role("heading", name="site-a").wait_for()
        page.reload()
        page.get_by_role("heading", name="Input").wait_for()
        assert page.evaluate("document.cookie + localStorage.length") == "0"
        other = browser.new_page()
        other.goto(page.url)
        other.get_by_label("Token").wait_for()
        other.close()


@pytest.mark.slow
def test_features_are_typed(tmp_path: Path, page: "Page") -> None:
    served = small_served(tmp_path / "store", spec=FEATURES)
    with opened(page, served, token=None):
        for typed, seen in (
            ("0.5, -1 2\n3e1", page.locator("#neighbors li").first),
            ("0.5, x", page.get_by_role("alert").get_by_text("x")),
            ("0.5", page.get_by_role("alert").get_by_text("4")),
        ):
            page.get_by_label("Features, 4 numbers").fill(typed)
            page.get_by_role("button", name="Predict").click()
            seen.wait_for()


@pytest.mark.slow
def test_everything_is_reached_with_the_keyboard_and_has_a_name(
    tmp_path: Path, page: "Page"
) -> None:
    served = small_served(tmp_path / "store")
    with opened(page, served, token=None):
        page.get_by_role("heading", name="site-a").wait_for()
        page.keyboard.press("Tab")
        focused = page.evaluate("document.activeElement.id")
        choose(page, tmp_path, served)
        page.locator("#neighbors li").first.wait_for()
        for expected in ("label", ""):
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.id") == expected
        unnamed = page.evaluate(
            "[...document.querySelectorAll('input, select, textarea')]"
            ".filter(one => !one.labels.length && !one.ariaLabel).length"
        )
        without_text = page.evaluate(
            "[...document.querySelectorAll('img')].filter(one => !one.alt).length"
        )
        for width in (360, 1080):  # nothing is wider than the window
            page.set_viewport_size({"width": width, "height": 700})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (focused, unnamed, without_text) == ("file", 0, 0)
