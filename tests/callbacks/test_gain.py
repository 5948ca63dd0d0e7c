"""What a rise of the score is made of."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lit_callbacks.gain import explain_gain, main


def run(
    worth: dict[str, float], truncated: tuple[float, float], skill: float = 0.0, n: int = 60
) -> list[dict[str, Any]]:
    """Eight steps in which the share of cut-off responses moves, and skill rises."""
    rng, samples = random.Random(0), []
    for step in range(8):
        share = step / 7
        for _ in range(n):
            cut = rng.random() < truncated[0] + share * (truncated[1] - truncated[0])
            length = 48 if cut else rng.randint(10, 40)
            opens = rng.random() < 0.1 + 0.6 * share
            words = [f"w{rng.randint(0, 999)}" for _ in range(length)]
            text = " ".join([*("research suggests" if opens else "the thing").split(), *words])
            score = skill * share + worth.get("truncated", 0.0) * cut + rng.gauss(0, 0.1)
            score += worth.get("length", 0.0) * length + worth.get("opening", 0.0) * opens
            samples.append(
                {"step": step, "response": text, "score": score, "length": length, "truncated": cut}
            )
    return samples


def test_gain_of_fewer_cut_off_responses_is_not_one_of_skill() -> None:
    gain = explain_gain(run({"truncated": -1.0}, truncated=(0.5, 0.05)))
    assert gain.parts["truncated"] == pytest.approx(gain.total, abs=0.03)
    assert abs(gain.rest) < 0.03
    assert "is fewer cut-off responses" in gain.sentence()


def test_skill_that_no_property_explains_remains() -> None:
    gain = explain_gain(run({}, truncated=(0.5, 0.05), skill=1.0))
    assert gain.rest == pytest.approx(gain.total, rel=0.05)
    assert "nothing of it is length, form or opening" in gain.sentence()


def test_opening_and_skill_share_a_gain() -> None:
    gain = explain_gain(run({"opening": 2.0}, truncated=(0.2, 0.2), skill=1.0))
    assert gain.opening == "research suggests"
    # the opening rises from 0.1 to 0.7 of the responses; a quarter of the steps is cut off the ends
    assert gain.parts["opening"] == pytest.approx(2 * 0.6 * 6 / 7, rel=0.15)
    assert gain.rest == pytest.approx(6 / 7, abs=0.05)
    assert "is the commonest opening ('research suggests')" in gain.sentence()


def test_gain_against_which_a_property_works_has_no_shares() -> None:
    gain = explain_gain(run({"truncated": -1.0}, truncated=(0.05, 0.5), skill=1.0))
    assert gain.total > 0 > gain.parts["truncated"]
    assert not gain.adds_up
    assert gain.sentence().endswith("cannot be divided, since some of its parts are negative")


def test_score_that_fell_has_no_gain() -> None:
    gain = explain_gain(run({}, truncated=(0.1, 0.1), skill=-1.0))
    assert gain.sentence().startswith("the score did not rise (-0.8")


def test_property_that_never_varies_explains_nothing() -> None:
    samples = [s | {"truncated": False} for s in run({"length": 0.1}, truncated=(0.1, 0.1))]
    assert explain_gain(samples).parts["truncated"] == 0.0
    without = [{k: v for k, v in s.items() if k != "truncated"} for s in samples]
    assert set(explain_gain(without).parts) == {"length", "opening", "repetition"}


def test_too_few_samples_are_refused() -> None:
    samples = run({}, truncated=(0.1, 0.1), n=1)
    with pytest.raises(ValueError, match="expected at least 20 responses for 4 properties and 8"):
        explain_gain(samples)
    with pytest.raises(ValueError, match="responses of at least two steps, got 1"):
        explain_gain(samples[:1])


def test_file_of_samples_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.jsonl"
    samples = run({"truncated": -1.0}, truncated=(0.5, 0.05))
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    main([str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{file}: of the gain of 0.")
    assert [line.split()[0] for line in lines[2:]] == [
        *("truncated", "length", "opening", "repetition", "rest", "all")
    ]


def test_responses_without_a_score_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "samples.jsonl"
    samples = run({"truncated": -1.0}, truncated=(0.5, 0.05))
    samples[-1]["score"] = None
    del samples[-2]["score"]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    main([str(file)])
    expected = f"{file}: 2 of {len(samples)} responses have no finite score and are left out"
    assert capsys.readouterr().out.splitlines()[0] == expected


@pytest.mark.parametrize(
    ("key", "value"), [("length", "NaN"), ("length", "Infinity"), ("truncated", "1e308")]
)
def test_property_that_is_not_finite_is_refused(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(f'{{"step": 1, "response": "a", "score": 1, "{key}": {value}}}\n')
    with pytest.raises(ValueError, match=rf"samples\.jsonl:1: expected a finite number as {key}"):
        main([str(file)])
