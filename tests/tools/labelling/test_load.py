"""Twenty people label two thousand times through a server that is killed three times."""

import http.client
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from lit_rlhf.tools.evaluation.labels import read_labels
from tests.support.evaluation_folders import write_lines
from tests.support.labelling import (
    Browser,
    LabelProcess,
    end_process,
    free_port,
    prefer_good,
    start_label_command,
    until_answered,
)

N_PEOPLE = 20
N_COMPARISONS = 100
KILLS = (400, 1000, 1600)  # labels in the file


def work(port: int, token: str, name: str) -> list[str]:
    """Label until nothing is left, and return the prompts whose labels the page has confirmed."""
    browser = Browser(port)
    page = until_answered(lambda: browser.enter(name, token))
    confirmed = []
    while 'action="/label"' in page.text:
        form = {**page.inputs, "choice": prefer_good(page)}
        try:
            reply = browser.post("/label", form, follow=False)
        except (OSError, http.client.HTTPException):
            page = until_answered(browser.get)  # a person loads the page again
            continue
        assert reply.status == 303
        confirmed.append(page.texts[0])
        page = until_answered(browser.get)
    assert 'id="done"' in page.text
    return confirmed


def kill_three_times(
    started: LabelProcess, words: list[str], folder: Path, done: Event
) -> LabelProcess:
    """Kill the server when the file has so many labels, and start it again."""
    for number in KILLS:
        while count_lines(folder / "labels.jsonl") < number:
            assert not done.wait(0.05), "the labels were made before the server was killed"
        end_process(started.process)
        started = start_label_command(words, folder)
    return started


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow  # four servers and two thousand labels: a minute
def test_no_label_is_lost_or_doubled_by_kills(tmp_path: Path) -> None:
    files = [
        write_lines(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"p{i}", "response": f"{text} {i}"} for i in range(N_COMPARISONS)],
        )
        for name, text in (("sft", "bad"), ("ppo", "good"))
    ]
    words = ["--responses", *files, "--output", "labels.jsonl", "--port", str(free_port())]
    words += ["--annotators_per_comparison", str(N_PEOPLE), "--repeat_share", "0"]
    names = [f"person {number}" for number in range(N_PEOPLE)]
    started = start_label_command(words, tmp_path)
    done = Event()
    with ThreadPoolExecutor(N_PEOPLE + 1) as pool:
        killer = pool.submit(kill_three_times, started, words, tmp_path, done)
        people = [pool.submit(work, started.port, started.token, name) for name in names]
        try:
            confirmed = {
                (name, prompt)
                for name, person in zip(names, people, strict=True)
                for prompt in person.result()
            }
        finally:
            done.set()
            end_process(killer.result().process)
    labels = read_labels(str(tmp_path / "labels.jsonl"))
    in_file = Counter((label.annotator, label.prompt[0].content) for label in labels)
    assert len(labels) == N_PEOPLE * N_COMPARISONS
    assert set(in_file.values()) == {1}  # none doubled
    assert confirmed <= in_file.keys()  # none lost
    assert {label.choice for label in labels} == {"b"}  # and none is another's
    print(f"{len(labels)} labels, {len(confirmed)} confirmed, {len(KILLS)} kills")
