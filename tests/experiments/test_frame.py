"""The frame of all experiments: they are listed, and their pages follow from their results."""

import logging
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.__main__ import format_list, main
from experiments.frame import (
    README,
    ROOT,
    experiment_names,
    fill_template,
    format_readme,
    make_command,
    read_about,
    read_commands,
    write_documents,
)

MOST_WORDS = 900
"""Words of a page of evidence."""


@pytest.mark.parametrize("name", experiment_names())
def test_documents_follow_from_the_committed_results(name: str) -> None:
    study = __import__(f"experiments.{name}.study", fromlist=["documents"])
    for path, document in study.documents().items():
        if isinstance(document, str):
            assert path.read_text("utf-8") == document, f"run python -m experiments {name} page"
            if path.parent.name == "docs":
                assert len(document.split()) <= MOST_WORDS, path.name
        else:
            assert path.is_file()


@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_can_be_run_and_has_a_page(name: str) -> None:
    commands = read_commands(name)
    assert {"run", "page"} <= commands.keys()
    for command in commands.values():
        command.build_parser("python -m experiments")  # every argument has a type and a text
    assert (ROOT / read_about(name).page).is_file()


def test_readme_lists_every_experiment() -> None:
    readme = README.read_text("utf-8")
    assert readme == format_readme(), "run python -m experiments readme"
    assert all(f"[{name}](" in readme for name in experiment_names())
    assert all(f"\n{name}\n" in format_list() for name in experiment_names())


def test_required_texts_are_words_and_all_others_flags() -> None:
    def act(model: str, names: list[str], *, seed: int, folder: str = "runs") -> None:
        """Act."""

    act.__annotations__ = {"model": "str", "names": "list[str]", "seed": "int", "folder": "str"}
    assert list(make_command(act).words) == ["model", "names"]


def test_unknown_experiment_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SystemExit, match=r"no experiment 'estimator'; did you mean estimators\?"):
        main(["estimator"])


def test_experiments_hide_notes_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("bitsandbytes"), "level", logging.NOTSET)
    main([])
    assert logging.getLogger("bitsandbytes").level == logging.ERROR


def test_help_of_an_experiment_has_its_question_and_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["label_noise"])
    shown = capsys.readouterr().out
    assert "Does the strength of pairs find wrong labels" in " ".join(shown.split())
    assert all(f"  {command} " in shown for command in ("run", "run_one", "page"))


def test_documents_are_written_and_figures_repeat(tmp_path: Path) -> None:
    def draw() -> Figure:
        figure = Figure()
        figure.subplots().plot([1, 2], [3, 4])
        return figure

    paths = [tmp_path / "new" / "page.md", tmp_path / "figure.svg"]
    assert list(write_documents({paths[0]: "text\n", paths[1]: draw})) == paths
    assert paths[0].read_text("utf-8") == "text\n"
    first = paths[1].read_bytes()
    list(write_documents({paths[1]: draw}))
    assert paths[1].read_bytes() == first


def test_template_refuses_a_missing_value(tmp_path: Path) -> None:
    template = tmp_path / "page.md.j2"
    template.write_text("{{ gold }} of {{ seeds }}\n", "utf-8")
    assert fill_template(template, gold="1.0", seeds=3) == "1.0 of 3\n"
    with pytest.raises(Exception, match="'seeds' is undefined"):
        fill_template(template, gold="1.0")
