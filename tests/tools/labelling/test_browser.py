"""The page in a real browser, driven by the keyboard."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import Message
from lit_rlhf.tools.evaluation.labels import Comparison, read_labels
from lit_rlhf.tools.labelling.words import CHINESE, ENGLISH
from tests.support.labelling import TOKEN, Served, make_comparisons, served_page

CHROMIUM = shutil.which("chromium")
WIDE = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.slow,  # starts a browser
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


def comparisons() -> list[Comparison]:
    """Comparisons, of which the first is long, the second hostile and the third Chinese."""
    made = make_comparisons(24)
    lines = [f"good line {number}, with a few more words to fill it." for number in range(80)]
    made[0] = replace(
        made[0],
        prompt=(Message("user", "\n".join(lines)),),
        response_b="\n".join(lines),
        response_a="bad.\n\n  - indented\n" * 60,
    )
    made[1] = replace(
        made[1],
        response_a="<script>document.title = 'owned'</script><img src=x onerror=alert(1)>",
        response_b="good \u202eright to left\u202c <|endoftext|> \x1b[2J " + "w" * 300,
    )
    made[2] = replace(
        made[2],
        prompt=(
            Message("system", "请简短回答。"),
            Message("user", "说出两种金属。"),
            Message("assistant", "铁和锌。"),
            Message("user", "再说两种。"),
        ),
        response_a="不知道。",
        response_b="good：铜和金。",
    )
    return made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    path = tmp_path / "labels.jsonl"
    with served_page(path, comparisons(), annotators_per_comparison=2) as served:
        yield served


def open_page(chromium: Any, served: Served, name: str, **options: Any) -> Any:
    """A page of somebody who has given a name by the keyboard; errors of the page are kept."""
    context = chromium.new_context(**{"viewport": WIDE, "locale": "en-GB", **options})
    page = context.new_page()
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(f"http://127.0.0.1:{served.port}/?token={TOKEN}")
    page.keyboard.type(name)
    with page.expect_navigation():
        page.keyboard.press("Enter")
    return page


def press(page: Any, key: str) -> None:
    """Press a key that leads to the next page."""
    with page.expect_navigation():
        page.keyboard.press(key)


def better_key(page: Any) -> str:
    """The key of the good response."""
    return "1" if page.locator(".answer .text").first.inner_text().startswith("good") else "2"


def overflow(page: Any) -> int:
    """Pixels by which the page is wider than the window."""
    return int(page.evaluate("document.scrollingElement.scrollWidth - innerWidth"))


def test_keyboard_alone_labels_twenty_comparisons(
    chromium: Any, served: Served, tmp_path: Path
) -> None:
    page = open_page(chromium, served, "Ann")
    assert "token" not in page.url
    page.screenshot(path=tmp_path / "wide_long.png")
    answers = page.locator(".answers").bounding_box()
    assert page.locator(".choices").bounding_box()["y"] >= answers["y"] + answers["height"]
    below = page.locator(".more").bounding_box()
    assert below["y"] + below["height"] <= WIDE["height"]  # buttons and remark beside long texts
    for number in range(20):
        if number == 1:
            page.screenshot(path=tmp_path / "wide_hostile.png")
            assert page.title() == ENGLISH["title"]
        if number == 2:
            page.screenshot(path=tmp_path / "wide_chinese_text.png")
            # four turns leave room, so nobody has to scroll
            hidden = "box => box.scrollHeight - box.clientHeight"
            assert page.locator(".dialogue").evaluate(hidden) == 0
        if number == 5:
            page.keyboard.press("r")
            page.keyboard.type("12 b u")  # a remark, in which keys are letters
            page.keyboard.press("Escape")
            page.keyboard.press("c")
        if number == 7:
            before = page.locator(".dialogue").inner_text()
            page.reload()
            assert page.locator(".dialogue").inner_text() == before
        if number == 9:
            press(page, "0")
            press(page, "u")
        press(page, better_key(page))
    labels = read_labels(str(served.store.path))
    assert len(labels) == 20
    assert [label.choice for label in labels] == ["b"] * 20
    assert (labels[5].remark, labels[5].strength) == ("12 b u", "clearly")
    assert all(label.seconds is not None and label.seconds >= 0 for label in labels)
    assert {label.left for label in labels} == {"a", "b"}
    press(page, "b")
    press(page, "s")
    press(page, "0")
    press(page, better_key(page))
    assert page.locator("#done").count() == 1
    page.screenshot(path=tmp_path / "wide_done.png")
    labels = read_labels(str(served.store.path))
    assert [label.choice for label in labels[20:]] == ["both_bad", "skip", "tie", "b"]
    assert page.problems == []
    page.context.close()


def test_two_people_label_at_once(chromium: Any, served: Served) -> None:
    ann, bob = (open_page(chromium, served, name) for name in ("Ann", "Bob"))
    for _ in range(10):
        for page in (ann, bob):
            press(page, better_key(page))
    labels = read_labels(str(served.store.path))
    assert [label.annotator for label in labels] == ["Ann", "Bob"] * 10
    assert len({(label.annotator, label.comparison) for label in labels}) == 20
    for page in (ann, bob):
        assert page.problems == []
        page.context.close()


def test_long_responses_scroll_together(chromium: Any, served: Served) -> None:
    page = open_page(chromium, served, "Ann")
    panes = page.locator(".answer .text")
    panes.first.evaluate("pane => pane.scrollTop = (pane.scrollHeight - pane.clientHeight) / 2")
    page.wait_for_timeout(300)
    share = panes.last.evaluate("pane => pane.scrollTop / (pane.scrollHeight - pane.clientHeight)")
    assert share == pytest.approx(0.5, abs=0.01)
    assert panes.first.evaluate("pane => getComputedStyle(pane).whiteSpace") == "pre-wrap"
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_has_buttons_in_reach_and_no_overflow(
    chromium: Any, served: Served, tmp_path: Path, scheme: str
) -> None:
    options = {"viewport": PHONE, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
    page = open_page(chromium, served, "Ann with a very long name", **options)
    tops = set()
    for number in range(4):
        assert overflow(page) == 0
        progress = page.locator(".progress").bounding_box()
        language = page.locator('button[lang="zh"]').bounding_box()
        assert language["y"] < progress["y"] + progress["height"]  # on the same line
        page.screenshot(path=tmp_path / f"phone_{scheme}_{number}.png")
        button = page.locator('button[value="left"]')
        box = button.bounding_box()
        assert box["y"] + box["height"] <= PHONE["height"]  # without scrolling
        tops.add(box["y"])
        if number == 0:  # a long response keeps its heading, and the strength follows the responses
            page.locator(".answer").first.evaluate("answer => scrollTo(0, answer.offsetTop + 900)")
            heading = page.locator(".answer h2").first.bounding_box()
            assert 0 <= heading["y"] < PHONE["height"] / 2
            page.locator('input[value="clearly"]').tap()
        with page.expect_navigation():
            button.tap()
    assert len(tops) == 1  # the thumb stays where it is
    page.screenshot(path=tmp_path / f"phone_{scheme}_full.png", full_page=True)
    assert page.problems == []
    assert len(read_labels(str(served.store.path))) == 4
    page.context.close()


def test_chinese_interface(chromium: Any, served: Served, tmp_path: Path) -> None:
    page = open_page(chromium, served, "安娜", locale="zh-CN", color_scheme="dark")
    assert page.title() == CHINESE["title"]
    press(page, better_key(page))
    press(page, better_key(page))
    page.screenshot(path=tmp_path / "wide_chinese.png")
    with page.expect_navigation():
        page.get_by_text("English").click()
    assert page.title() == ENGLISH["title"]
    page.context.close()


def test_page_works_without_scripts(chromium: Any, served: Served) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{served.port}/?token={TOKEN}")
    page.fill("#name", "Ann")
    page.click("text=Start")
    page.click('button[value="tie"]')
    page.click('button[form="undo"]')
    page.click('button[value="left"]')
    (label,) = read_labels(str(served.store.path))
    assert label.choice in ("a", "b")
    assert label.seconds is None
    context.close()
