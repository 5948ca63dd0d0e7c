"""The page over real HTTP: what it shows, what it saves, and whom it refuses."""

import errno
import http.client
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest

from lit_rlhf.data import Message
from lit_rlhf.tools.evaluation.labels import read_labels
from lit_rlhf.tools.labelling import page as page_module
from lit_rlhf.tools.labelling import schedule as schedule_module
from lit_rlhf.tools.labelling.page import (
    MAX_BODY,
    MAX_REMARK,
    is_name,
    read_seconds,
    render_markdown,
    show_text,
)
from lit_rlhf.tools.labelling.store import Task
from lit_rlhf.tools.labelling.words import CHINESE, ENGLISH, preferred_language
from tests.support.labelling import (
    TOKEN,
    Browser,
    Served,
    label_all,
    make_comparisons,
    prefer_good,
    served_page,
)

HOSTILE = (
    "<script>document.title = 'owned'</script>\n"
    "</div></section><img src=x onerror=alert(1)> &lt; {{ 7 * 7 }}\n"
    "\u202egnp.exe \u2066\x00\x1b[2J <|endoftext|> </s> \"'` \ud800"
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with served_page(tmp_path / "labels.jsonl", make_comparisons(6)) as served:
        yield served


def test_choices_are_saved_with_what_was_seen(served: Served) -> None:
    browser = served.browser()
    page = browser.enter("Ann")
    assert page.texts[0] == "question 0"
    first = browser.choose(
        page,
        prefer_good(page),
        strength="clearly",
        remark="a\r\nremark ",
        seconds="12.34",
    )
    tie = browser.choose(first, "tie", strength="clearly", seconds="nan")
    bad = browser.choose(tie, "both_bad")
    browser.choose(bad, "skip")
    labels = read_labels(str(served.store.path))
    assert [label.choice for label in labels] == ["b", "tie", "both_bad", "skip"]
    assert [label.strength for label in labels] == ["clearly", None, None, None]
    assert labels[0].remark == "a\nremark"
    assert labels[0].seconds == 12.3
    assert labels[1].seconds is None
    assert {label.annotator for label in labels} == {"Ann"}
    assert labels[0].left == ("b" if page.left.startswith("good") else "a")
    assert labels[0].policies == {"sft": "hash of sft", "ppo": None}
    assert labels[0].time.endswith("+00:00")


def test_page_names_no_policy_and_no_side(served: Served) -> None:
    browser = served.browser()
    page = browser.enter("Ann")
    for _ in range(6):
        headers = {k: v for k, v in page.headers.items() if "policy" not in k}
        source = page.text + str(headers) + str(browser.cookies)
        for word in ("sft", "ppo", "policy", "baseline", served.schedule.order[0].key, "spread"):
            assert word not in source.lower()
        # nothing that an annotator sends or gets has the side as a value
        assert re.findall(r'value="([ab])"', page.text) == []
        page = browser.choose(page, prefer_good(page))


def test_pages_of_both_orders_differ_in_the_texts_alone(tmp_path: Path) -> None:
    with served_page(tmp_path / "labels.jsonl", make_comparisons(1)) as served:
        pages = {}
        for number in range(8):
            browser = served.browser()
            page = browser.enter(f"ann{number}")
            if 'action="/label"' not in page.text:
                served.schedule._taken[served.schedule.order[0].key].clear()
                page = browser.get()
            text = re.sub(r'value="[^"]*"|ann\d', "", page.text)
            pages[page.left] = text.replace(page.left, "L").replace(page.right, "R")
        assert len(pages) == 2
        assert len(set(pages.values())) == 1


def test_form_that_is_sent_twice_is_saved_once(served: Served) -> None:
    browser = served.browser()
    page = browser.enter("Ann")
    second = browser.choose(page, "left")
    assert browser.choose(page, "right").inputs["task"] == second.inputs["task"]
    assert len(read_labels(str(served.store.path))) == 1


def test_undo_takes_back_the_last_choice(served: Served) -> None:
    browser = served.browser()
    first = browser.enter("Ann")
    assert 'form="undo"' not in first.text
    second = browser.choose(first, "tie")
    repeated = browser.undo(second)
    assert (repeated.left, repeated.right) == (first.left, first.right)
    assert served.store.path.read_bytes() == b""
    assert label_all(browser, repeated) == 6
    assert [label.choice for label in read_labels(str(served.store.path))] == ["b"] * 6
    done = browser.get()
    assert "Your 6 choices are saved" in done.text
    assert 'action="/label"' in browser.undo(done).text


def test_several_people_label_at_once(tmp_path: Path) -> None:
    with served_page(
        tmp_path / "labels.jsonl", make_comparisons(6), annotators_per_comparison=2
    ) as served:
        people = {name: served.browser() for name in ("Ann", "Bob", "安")}
        pages = {name: browser.enter(name) for name, browser in people.items()}
        n_labels = 0
        while any('action="/label"' in page.text for page in pages.values()):
            for name, browser in people.items():
                if 'action="/label"' in pages[name].text:
                    pages[name] = browser.choose(pages[name], prefer_good(pages[name]))
                    n_labels += 1
                else:
                    pages[name] = browser.get()
        labels = read_labels(str(served.store.path))
    assert n_labels == len(labels) == 12
    assert len({(label.annotator, label.comparison) for label in labels}) == 12
    assert {label.annotator for label in labels} == {*people}


def test_label_of_a_page_from_before_a_restart_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    comparisons = make_comparisons(2)
    with served_page(path, comparisons) as first:
        browser = first.browser()
        page = browser.enter("Ann")
    with served_page(path, comparisons) as second:
        browser.port = second.port
        browser.choose(page, prefer_good(page))
        assert [label.choice for label in read_labels(str(path))] == ["b"]


def test_second_look_says_so(tmp_path: Path) -> None:
    with served_page(tmp_path / "labels.jsonl", make_comparisons(1), repeat_share=1.0) as served:
        browser = served.browser()
        first = browser.enter("Ann")
        repeated = browser.choose(first, "left")
        assert ENGLISH["again"] in repeated.text
        assert (repeated.left, repeated.right) == (first.right, first.left)
        browser.choose(repeated, "right")
        labels = read_labels(str(served.store.path))
    assert [label.repeat for label in labels] == [False, True]
    assert labels[0].choice == labels[1].choice


def test_interface_is_english_or_chinese(served: Served) -> None:
    browser = served.browser(**{"Accept-Language": "zh-CN,zh;q=0.9"})
    page = browser.enter("安娜")
    assert '<html lang="zh">' in page.text
    assert CHINESE["tie"] in page.text
    assert "请选" in page.text  # the guidelines
    page = browser.post("/language", {"form_token": page.form_token("language")})
    assert ENGLISH["both_bad"] in page.text
    assert "Not 安娜?" in page.text
    assert ENGLISH.keys() == CHINESE.keys()
    for accepted, expected in (("", "en"), ("fr, zh-TW", "zh"), ("en-GB,zh", "en"), ("de", "en")):
        assert preferred_language(accepted) == expected


# --- text


@pytest.mark.parametrize("place", ["prompt", "response_a", "response_b", "remark", "name"])
def test_html_is_shown_as_text(tmp_path: Path, place: str) -> None:
    comparison = make_comparisons(1)[0]
    if place == "prompt":
        comparison = replace(comparison, prompt=(Message("user", HOSTILE),))
    elif place.startswith("response"):
        comparison = replace(comparison, **{place: HOSTILE})
    with served_page(tmp_path / "labels.jsonl", [comparison], repeat_share=1.0) as served:
        browser = served.browser()
        name = "<img src=x onerror=alert(1)>" if place == "name" else "Ann"
        page = browser.enter(name)
        expected = "<script>document.title = 'owned'</script>"
        if place not in ("name", "remark"):
            assert any(expected in text for text in page.texts)
            assert any("␀␛[2J <|endoftext|> </s>" in text for text in page.texts)
        page = browser.choose(page, "tie", remark=HOSTILE.encode(errors="replace").decode())
        for text in (page.text, browser.choose(page, "tie").text):
            assert "<script>document" not in text
            assert "<img" not in text
            assert text.count("<script") == 1
        (label, _) = read_labels(str(served.store.path))
        assert label.annotator == name
        assert label.text_hash == comparison.text_hash


def test_response_of_ten_megabytes_is_shown_whole(tmp_path: Path) -> None:
    long = "<b>x</b> " * (10 * 1024 * 1024 // 9)
    comparison = replace(make_comparisons(1)[0], response_b=long)
    with served_page(tmp_path / "labels.jsonl", [comparison]) as served:
        browser = served.browser()
        page = browser.enter("Ann")
        assert long in (page.left, page.right)
        assert browser.choose(page, "left").status == 200
        (label,) = read_labels(str(served.store.path))
        assert label.response_b == long


def test_signs_stand_for_control_characters() -> None:
    assert show_text("a\x00\x1b\x7f\x9b\ud800\r\n\tb") == "a␀␛\ufffd\ufffd\ufffd\n\tb"
    assert show_text("a\rb") == "a␍b"
    assert show_text("a\u202eb\u200f") == "a⟨U+202E⟩b\u200f"
    rendered = render_markdown("# A\n\n<script>x</script> [l](javascript:x) | a |")
    assert "<script>" not in rendered
    assert "href" not in rendered


def test_names_and_times_that_cannot_be() -> None:
    assert [is_name(name) for name in ("Ann", "安", "x" * 64)] == [True] * 3
    for name in ("", "x" * 65, "a\nb", "a\x00", "\u202ea", "a\u2028", "\ud800"):
        assert not is_name(name)
    assert [read_seconds(text) for text in ("1.25", "0")] == [1.2, 0.0]
    assert [read_seconds(t) for t in ("", "x", "nan", "inf", "-1", "1e9")] == [None] * 6


# --- attacks


def test_nobody_gets_in_without_the_token(served: Served) -> None:
    for path in ("/", "/?token=", "/?token=wrong", "/static/style.css", "/static/label.js"):
        browser = served.browser()
        answer = browser.get(path)
        assert answer.status == 403
        assert browser.cookies == {}
        assert "question" not in answer.text
    known = served.browser()
    known.enter("Ann")
    assert known.get("/?token=wrong").status == 403
    for cookie in ("x", "x.y", ".", next(iter(known.cookies.values()))[:-1] + "x"):
        forged = Browser(served.port, cookies={"lit_rlhf_label": cookie})
        assert forged.get().status == 403
        assert forged.post("/label", {"choice": "left"}).status == 403


def test_cookies_are_out_of_reach_and_headers_forbid_scripts(served: Served) -> None:
    browser = served.browser()
    answer = browser.get(f"/?token={TOKEN}", follow=False)
    assert answer.status == 303
    assert answer.headers["location"] == "/"  # the token leaves the address
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=lax" in answer.headers["set-cookie"]
    for page in (answer, browser.get(), served.browser().get(), browser.get("/static/label.js")):
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["cache-control"] == "no-store"
    text = browser.enter("Ann").text
    assert "built-in" not in text
    assert re.findall(r"\son\w+=|style=|javascript:|https?://", text) == []
    assert re.findall(r"<script(?! src=\"/static/label.js\" defer></script>)", text) == []


def test_form_of_another_site_is_refused(served: Served) -> None:
    browser = served.browser()
    page = browser.enter("Ann")
    form = {**page.inputs, "choice": "left"}
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{served.port + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data; boundary=x"},
    ):
        assert browser.post("/label", form, headers=headers).status == 403
    own_headers = {"Origin": f"http://127.0.0.1:{served.port}", "Sec-Fetch-Site": "same-origin"}
    assert browser.post("/label", form, headers=own_headers).status == 200
    assert len(read_labels(str(served.store.path))) == 1


def test_forms_need_tokens_of_their_own(served: Served) -> None:
    browser = served.browser()
    page = browser.enter("Ann")
    other = served.browser()
    foreign = other.enter("Bob")
    good = {**page.inputs, "choice": "left"}
    for change in (
        {"form_token": ""},
        {"form_token": "ü"},
        {"form_token": page.form_token("undo")},
        {"form_token": foreign.inputs["form_token"]},
        {"task": ""},
        {"task": "0" * 64},
        {"task": foreign.inputs["task"]},  # given to another annotator
        {"choice": "a"},
        {"choice": ""},
        {"strength": "very"},
        {"remark": "x" * (MAX_REMARK + 1)},
    ):
        answer = browser.post("/label", {**good, **change})
        assert (change, answer.status) == (change, 403)
    for path in ("/undo", "/name", "/language"):
        assert browser.post(path, {"form_token": good["form_token"], "name": "x"}).status == 403
    assert read_labels_if_any(served) == []
    assert browser.get(path="/label").status == 405


def read_labels_if_any(served: Served) -> list[object]:
    return [*served.store.labels]


def test_comparison_that_was_not_given_out_is_refused(served: Served) -> None:
    browser = served.browser()
    page = browser.enter("Ann")
    last = served.schedule.order[-1]
    for task in (last.key, last.text_hash, Task("Ann", last.key), f"Ann\n{last.key}\nFalse"):
        form = {**page.inputs, "choice": "left", "task": str(task)}
        assert browser.post("/label", form).status == 403
    # a second look that the seed does not ask for has a token too, but nobody was given it
    assert not served.schedule.is_known(Task("Ann", last.key, repeat=True))
    assert not served.schedule.is_known(Task("Ann", "unknown"))


def test_long_and_broken_bodies_are_refused(served: Served) -> None:
    browser = served.browser()
    page = browser.enter("Ann")
    form = {**page.inputs, "choice": "left"}
    assert browser.post("/label", {**form, "remark": "x" * MAX_BODY}).status == 413
    for body in (b"\xff\xfe", b"%ff", b"a", b"", b"&".join(b"a=%d" % i for i in range(99))):
        assert browser.request("POST", "/label", body).status == 403
    for length in ("-1", "1e3", "9" * 40, "x"):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        connection.putrequest("POST", "/label")
        connection.putheader("Content-Length", length)
        connection.endheaders()
        assert connection.getresponse().status in (400, 413)
        connection.close()
    # a body whose length is not told beforehand
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    chunks = (b"x" * 1024 for _ in range(2 * MAX_BODY // 1024))
    try:
        connection.request("POST", "/label", chunks, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # closed before all of it was sent
    connection.close()
    assert read_labels_if_any(served) == []


@pytest.mark.parametrize(
    "path",
    [
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/%2e%2e/page.py",
        "/static/....//page.py",
        "/static//etc/passwd",
        "/static/label.js%00.css",
        "/../../etc/passwd",
        "/static/",
        "/labels.jsonl",
        "/docs",
    ],
)
def test_paths_lead_nowhere_else(served: Served, path: str) -> None:
    browser = served.browser()
    browser.enter("Ann")
    answer = browser.get(path)
    assert answer.status == 404
    assert answer.text == "Not Found"


def test_foreign_host_is_refused(served: Served) -> None:
    browser = served.browser()
    browser.enter("Ann")
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1", ""):
        assert browser.get(headers={"Host": host}).status == 421


def test_full_disk_is_told_and_nothing_is_lost(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = served.browser()
    page = browser.enter("Ann")
    real = os.write
    file = served.store._file

    def write(descriptor: int, data: bytes) -> int:
        if descriptor == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    answer = browser.choose(page, "left")
    assert answer.status == 507
    assert "No space left on device" in answer.text
    monkeypatch.undo()
    reloaded = browser.get()
    assert reloaded.inputs["task"] == page.inputs["task"]
    browser.choose(reloaded, "left")
    assert len(read_labels(str(served.store.path))) == 1


def test_disk_that_is_full_when_a_task_is_given_out_is_told_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "labels.jsonl"
    open_tasks = tmp_path / "tasks.json"

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(open_tasks))

    with served_page(path, make_comparisons(8), open_tasks=open_tasks) as served:
        ann, bob = served.browser(), served.browser()
        second = ann.choose(ann.enter("Ann"), "left")
        third = ann.choose(second, "left")
        with monkeypatch.context() as full_disk:
            full_disk.setattr(schedule_module, "write_text", refuse)
            answers = [bob.enter("Bob"), ann.choose(third, "left"), ann.undo(third)]
            assert [answer.status for answer in answers] == [507] * 3
            for answer in answers:
                assert "No space left on device" in answer.text
                assert str(tmp_path) not in answer.text
            assert "Your choices up to here are saved" in answers[0].text
            assert "could not be saved" in answers[2].text
        labels = [label.comparison for label in read_labels(str(path))]
        assert labels[:2] == [one.key for one in served.schedule.order[:2]]
        pages = {"Ann": ann.get(), "Bob": bob.get()}
        assert all(page.status == 200 for page in pages.values())
        # the others' tasks are noted with the next one
        cem = served.browser().enter("Cem")
        assert len({page.inputs["task"] for page in (*pages.values(), cem)}) == 3
    with served_page(path, make_comparisons(8), open_tasks=open_tasks) as served:
        for name, page in pages.items():
            assert served.browser().enter(name).left == page.left


def test_names_that_cannot_be_are_asked_again(served: Served) -> None:
    browser = served.browser()
    page = browser.get(f"/?token={TOKEN}")
    for name in ("x" * 65, "a\x00b", "\u202eabc"):
        answer = browser.post("/name", {"form_token": page.form_token("name"), "name": name})
        assert answer.status == 422
        assert ENGLISH["name_error"] in answer.text
    body = urlencode({"form_token": page.form_token("name"), "name": "  Ann  "}).encode()
    assert "Not Ann?" in browser.request("POST", "/name", body).text


def test_body_that_does_not_arrive_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "BODY_SECONDS", 0.01)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.putrequest("POST", "/label")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"a")
    assert connection.getresponse().status == 408
    connection.close()
