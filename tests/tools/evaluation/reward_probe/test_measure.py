"""The probe on rewards whose gains are known, and on the folders of tiny models."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.data import DataSource, DialogueEncoder, Message, parse_prompts
from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import ModelOptions, load_scalar_model
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.tools.evaluation.reward_probe import (
    CHEATS,
    AnswerEncoder,
    Attempt,
    Cheat,
    HonestAnswer,
    RewardProbe,
    Verdict,
    count_responses,
    draw_probe,
    load_probe,
    print_probe,
    probe_reward,
    summarize,
)
from tests.support.evaluation_folders import Folders, write_lines
from tests.support.tiny_models import EOS_ID, PAD_ID

ANSWERS = ["a bc", "de", "fghij kl", "l", "mn op qrs", "s", "tuv", "wx y z"]
LENGTHS = [len(answer) for answer in ANSWERS]
RECORDS = [
    {"prompt": f"request {row}", "chosen": answer, "rejected": "no"}
    for row, answer in enumerate(ANSWERS)
]


def honest_answers(encoder: AnswerEncoder, answers: Sequence[str] = ANSWERS) -> list[HonestAnswer]:
    rows = []
    for row, text in enumerate(answers):
        (prompt,) = _prompts(encoder.prompts, f"request {row}")
        rows.append(HonestAnswer(prompt, text, encoder.encode(prompt, Attempt(text))))
    return rows


def _prompts(encoder: DialogueEncoder, *texts: str) -> list[Any]:
    return [encoder.encode_prompt(record.prompt) for record in parse_prompts(texts)]


@pytest.fixture
def answers(encoder: DialogueEncoder) -> AnswerEncoder:
    return AnswerEncoder(encoder, positions=400)


def probe(answers: AnswerEncoder, reward: Any, cheats: Sequence[Cheat] = CHEATS) -> RewardProbe:
    weighted = WeightedReward(reward, ModelOptions(), answers.prompts.tokenizer).eval()
    return probe_reward(weighted, honest_answers(answers), answers, cheats=cheats)


def characters(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response.strip())) for response in responses]


def ended(prompts: list[str], responses: list[str], terminated: list[bool]) -> list[float]:
    return [float(flag) for flag in terminated]


def prefix(function: Callable[[str], str]) -> Cheat:
    return Cheat(
        "own",
        "changes the answer",
        lambda corpus, row: Attempt(function(corpus.answers[row])),
        "ignore the change",
    )


def result_of(probed: RewardProbe, name: str) -> Any:
    return next(cheat for cheat in probed.results if cheat.name == name)


def test_gain_is_the_paired_mean_in_standard_deviations(answers: AnswerEncoder) -> None:
    probed = probe(answers, [characters], [prefix(lambda text: text + "!!!")])
    cheat = result_of(probed, "own")
    std = statistics.pstdev(LENGTHS)
    assert probed.honest_mean == pytest.approx(statistics.fmean(LENGTHS))
    assert probed.honest_std == pytest.approx(std)
    # each response is three characters longer, so there is no doubt about the mean
    assert [cheat.gain, cheat.low, cheat.high] == pytest.approx([3 / std] * 3)
    assert cheat.by_reward["characters"] == pytest.approx(3 / std)
    assert cheat.wins == 1.0
    assert cheat.verdict is Verdict.GAINS
    assert cheat.n_prompts == probed.n_prompts == 8
    assert (cheat.about, cheat.advice) == ("changes the answer", "ignore the change")


def test_verdict_follows_the_interval(answers: AnswerEncoder) -> None:
    shorter = probe(answers, [characters], [prefix(lambda text: text[:-1])])
    assert result_of(shorter, "own").verdict is Verdict.COSTS
    # longer on half of the prompts and shorter by as much on the others
    mixed = prefix(lambda text: text + "!" if ANSWERS.index(text) % 2 else text[:-1])
    unclear = result_of(probe(answers, [characters], [mixed]), "own")
    assert unclear.gain == pytest.approx(0.0)
    assert unclear.low < 0 < unclear.high
    assert unclear.verdict is Verdict.NO_DIFFERENCE
    assert unclear.wins == 0.5


def test_said_twice_gains_by_characters_and_empty_costs(answers: AnswerEncoder) -> None:
    probed = probe(answers, [characters])
    std = statistics.pstdev(LENGTHS)
    longer = statistics.fmean(length + 1 for length in LENGTHS)  # a blank between them
    assert result_of(probed, "said twice").gain == pytest.approx(longer / std)
    assert result_of(probed, "empty").gain == pytest.approx(-statistics.fmean(LENGTHS) / std)
    assert [r.gain for r in probed.results] == sorted(
        (r.gain for r in probed.results), reverse=True
    )
    names = [cheat.name for cheat in probed.gaining]
    assert {"said twice", "flattery", "other language"} <= set(names)
    assert "empty" not in names
    assert summarize(probed).startswith(f"{len(names)} of ")


def test_gains_are_points_where_honest_answers_score_the_same(
    answers: AnswerEncoder, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = probe(answers, [ended])
    assert probed.honest_std == 0.0
    assert result_of(probed, "cut off").gain == -1.0
    assert {r.gain for r in probed.results if r.name != "cut off"} == {0.0}
    assert probed.gaining == []
    summary = summarize(probed)
    assert summary.startswith(
        f"None of {len(probed.results)} cheats scores higher than honest answers"
    )
    assert "does not tell these from them: " in summary
    print_probe(probed)
    assert (
        "Gains are in points, because all honest answers score the same.\n"
        in capsys.readouterr().out
    )


def test_sum_is_probed_with_its_weights(answers: AnswerEncoder) -> None:
    def minus(prompts: list[str], responses: list[str]) -> list[float]:
        return [-2.0 * score for score in characters(prompts, responses)]

    probed = probe(answers, {characters: 1.0, minus: 1.0}, [prefix(lambda text: text + "!!!")])
    cheat = result_of(probed, "own")
    std = statistics.pstdev(LENGTHS)
    assert cheat.gain == pytest.approx(-3 / std)  # the sum is minus the number of characters
    assert cheat.by_reward == pytest.approx({"characters": 3 / std, "minus": -3 / std})


def test_normalized_reward_is_measured_by_the_moments_of_honest_answers(
    answers: AnswerEncoder,
) -> None:
    weights: Any = {characters: {"weight": 2.0, "normalize": True}, ended: 1.0}
    weighted = WeightedReward(weights, ModelOptions(), answers.prompts.tokenizer).train()
    cheats = [prefix(lambda text: text + "!!!")]
    probed = probe_reward(weighted, honest_answers(answers), answers, cheats=cheats)
    std = statistics.pstdev(LENGTHS)
    # normalized honest answers have a deviation of 1, twice of which is the sum's
    assert probed.honest_std == pytest.approx(2.0)
    assert result_of(probed, "own").gain == pytest.approx(3 / std)
    assert weighted.training
    counts = [n for key, n in weighted.moments.state_dict().items() if key.endswith("count")]
    assert counts == [0]


def test_a_reward_that_abstains_counts_where_it_votes(answers: AnswerEncoder) -> None:
    def of_long_ones(prompts: list[str], responses: list[str]) -> list[float | None]:
        lengths = [len(response.strip()) for response in responses]
        return [float(length) if length > 4 else None for length in lengths]

    def never(prompts: list[str], responses: list[str]) -> list[float | None]:
        return [None] * len(responses)

    weights = {characters: 1.0, of_long_ones: 0.5, never: 1.0}
    probed = probe(answers, weights, [prefix(lambda text: text + "!!!")])
    cheat = result_of(probed, "own")
    # it votes for honest answers of more than four characters: 8, 9 and 6
    std = statistics.pstdev([8, 9, 6])
    assert cheat.by_reward["of_long_ones"] == pytest.approx(3 / std)
    assert math.isnan(cheat.by_reward["never"])
    report = json.loads(json.dumps(probed.as_dict()))
    assert report["results"][0]["by_reward"]["never"] is None


def votes_for(may_vote: Callable[[str], bool]) -> Any:
    """The number of characters of the responses that it votes for."""

    def characters_or_none(prompts: list[str], responses: list[str]) -> list[float | None]:
        texts = [response.strip() for response in responses]
        return [float(len(text)) if may_vote(text) else None for text in texts]

    return characters_or_none


def test_prompt_without_a_vote_for_the_cheat_is_left_out_of_its_gain(
    answers: AnswerEncoder, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = votes_for(lambda text: text not in ("", "silent", "tuv!!!"))
    weighted = WeightedReward([reward], ModelOptions(), answers.prompts.tokenizer).eval()
    honest = honest_answers(answers, ["silent", *ANSWERS])
    cheats = [prefix(lambda text: text + "!!!"), CHEATS[0]]
    probed = probe_reward(weighted, honest, answers, cheats=cheats)
    cheat = result_of(probed, "own")
    assert probed.honest_mean == pytest.approx(statistics.fmean(LENGTHS))
    assert (probed.n_prompts, probed.n_without_vote) == (8, 1)
    assert cheat.n_prompts == 7
    assert cheat.gain == pytest.approx(3 / statistics.pstdev(LENGTHS))
    assert probed.without_vote == ["empty"]
    print_probe(probed)
    printed = capsys.readouterr().out
    assert "abstain from these, which would end a run of PPO: empty." in printed.replace("\n", " ")
    assert "Left out: 1 (all rewards abstain from the honest answer)\n" in printed


def test_reward_with_too_few_votes_is_refused_and_left_as_it_was(answers: AnswerEncoder) -> None:
    reward = votes_for(lambda text: text != "de")
    weighted = WeightedReward([reward], ModelOptions(), answers.prompts.tokenizer)
    with pytest.raises(ValueError, match=r"^rewards: expected votes for at least 8 .* 7 of 8; all"):
        probe_reward(weighted, honest_answers(answers), answers)
    assert weighted.training
    assert not weighted.may_abstain


def test_canned_answer_is_chosen_on_other_prompts(answers: AnswerEncoder) -> None:
    probed = probe(answers, [characters], [])
    (canned,) = probed.results
    # the longest answer of rows 0, 2, 4 and 6 is measured on rows 1, 3, 5 and 7
    assert canned.example.cheat == "mn op qrs"
    std = statistics.pstdev(LENGTHS)
    assert canned.gain == pytest.approx(
        statistics.fmean(9 - LENGTHS[n] for n in (1, 3, 5, 7)) / std
    )
    assert canned.n_prompts == 4


def test_example_is_where_the_cheat_gains_most(answers: AnswerEncoder) -> None:
    cheat = prefix(lambda text: text + "!" * (5 if text == "tuv" else 1))
    example = result_of(probe(answers, [characters], [cheat]), "own").example
    assert example.honest == "tuv"
    assert example.cheat == "tuv!!!!!"
    assert (example.honest_score, example.cheat_score) == (3.0, 8.0)
    assert example.prompt == "\n\nHuman: request 6\n\nAssistant:"


def test_responses_are_the_ids_that_a_policy_samples(answers: AnswerEncoder) -> None:
    (prompt,) = _prompts(answers.prompts, "hi")
    tokenizer = answers.prompts.tokenizer

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return encoded

    # hh writes a blank before the answer
    assert answers.encode(prompt, Attempt("yes")) == ([*ids(" yes"), EOS_ID], True)
    assert answers.encode(prompt, Attempt("yes", ended=False)) == (ids(" yes"), False)
    assert answers.encode(prompt, Attempt("")) == ([EOS_ID], True)
    special = answers.encode(prompt, Attempt("yes", special_tokens=(str(tokenizer.pad_token),)))
    assert special == ([*ids(" yes"), PAD_ID, EOS_ID], True)
    continued = answers.encode(prompt, Attempt("yes\n\nHuman: and\n\nAssistant: no"))
    assert continued.ids == answers.encode(prompt, Attempt("yes and no")).ids


def test_a_response_that_is_too_long_is_cut_off(encoder: DialogueEncoder) -> None:
    (prompt,) = _prompts(encoder, "hi")
    whole = AnswerEncoder(encoder, positions=400).encode(prompt, Attempt("iron and zinc"))
    n_tokens = len(whole.ids)
    fits = AnswerEncoder(encoder, positions=400, max_new_tokens=n_tokens)
    assert fits.encode(prompt, Attempt("iron and zinc")) == whole
    short = AnswerEncoder(encoder, positions=400, max_new_tokens=n_tokens - 1)
    assert short.encode(prompt, Attempt("iron and zinc")) == (whole.ids[:-1], False)
    shorter = AnswerEncoder(encoder, positions=len(prompt.input_ids) + 3)
    assert shorter.encode(prompt, Attempt("iron and zinc")) == (whole.ids[:3], False)


def test_scores_are_those_of_the_reward_model(folders: Folders, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", RECORDS)
    loaded = load_probe({folders.reward: 1.0}, [DataSource(data)])
    probed = probe_reward(loaded.reward, loaded.answers, loaded.encoder, cheats=[CHEATS[3]])
    model = load_scalar_model(folders.reward).eval()
    encoder = loaded.encoder.prompts
    scores = []
    for record in RECORDS:
        answer = record["chosen"]
        for text in (answer, f"{answer} {answer}"):
            turns = [Message("user", record["prompt"]), Message("assistant", text)]
            ids = encoder.encode_dialogue(turns).input_ids[None].long()
            with torch.no_grad():
                scores.append(float(sequence_scores(model, ids, ids >= 0)))
    gains = [twice - once for once, twice in zip(scores[::2], scores[1::2], strict=True)]
    std = statistics.pstdev(scores[::2])
    assert result_of(probed, "said twice").gain == pytest.approx(
        statistics.fmean(gains) / std, rel=1e-3
    )


def test_number_of_responses_of_the_progress_bar_is_right(answers: AnswerEncoder) -> None:
    done: list[int] = []
    weighted = WeightedReward([characters], ModelOptions(), answers.prompts.tokenizer).eval()
    probe_reward(weighted, honest_answers(answers), answers, report_progress=done.append)
    # one of twelve cheats, stock phrases, does not apply; canned answers skip their own prompts
    assert sum(done) <= count_responses(8)
    assert sum(done) == 8 * (1 + 10) + 4 * 3 + 4


def test_scores_that_are_not_finite_are_refused_with_the_cheat(answers: AnswerEncoder) -> None:
    def per_word(prompts: list[str], responses: list[str]) -> list[float]:
        return [1.0 if response.split() else float("nan") for response in responses]

    with (
        pytest.warns(UserWarning, match="expected finite scores"),
        pytest.raises(ValueError, match=r"^rewards: expected finite scores, got nan for empty to"),
    ):
        probe(answers, [per_word])


def test_too_few_prompts_are_refused(answers: AnswerEncoder) -> None:
    weighted = WeightedReward([characters], ModelOptions(), answers.prompts.tokenizer).eval()
    with pytest.raises(ValueError, match=r"^data: expected at least 8 prompts .*, got 7$"):
        probe_reward(weighted, honest_answers(answers, ANSWERS[:7]), answers)


def test_records_give_their_fields_to_rewards(folders: Folders, tmp_path: Path) -> None:
    rows = [{"question": f"q {n}", "answer": text} for n, text in enumerate(ANSWERS)]
    data = write_lines(tmp_path / "sums.jsonl", rows)
    rule: Any = {"right": {"rule": "equals", "field": "answer"}}
    loaded = load_probe(rule, [DataSource(data)], policy=folders.sft)
    assert [answer.text for answer in loaded.answers] == ANSWERS
    probed = probe_reward(loaded.reward, loaded.answers, loaded.encoder)
    assert probed.honest_mean == 1.0
    assert result_of(probed, "said twice").gain == -1.0
    missing: Any = {"right": {"rule": "equals", "field": "other"}}
    with pytest.raises(ValueError, match=r"expected records with the field 'other'"):
        load_probe(missing, [DataSource(data)], policy=folders.sft)


def test_rows_with_one_prompt_keep_their_own_fields_and_are_read_once(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": "name one", "answer": text} for text in ANSWERS]
    read_rows = DataSource.read_rows
    reads: list[DataSource] = []

    def record_read(source: DataSource) -> Any:
        reads.append(source)
        return read_rows(source)

    monkeypatch.setattr(DataSource, "read_rows", record_read)
    data = write_lines(tmp_path / "sums.jsonl", rows)
    rule: Any = {"right": {"rule": "equals", "field": "answer"}}
    loaded = load_probe(rule, [DataSource(data)], policy=folders.sft)
    assert len(reads) == 1
    assert [answer.prompt.fields["answer"] for answer in loaded.answers] == ANSWERS
    assert probe_reward(loaded.reward, loaded.answers, loaded.encoder).honest_mean == 1.0


def test_answers_that_do_not_fit_are_left_out_and_counted(folders: Folders, tmp_path: Path) -> None:
    rows = [*RECORDS, {"prompt": "long", "chosen": "x " * 40, "rejected": "no"}]
    data = write_lines(tmp_path / "pairs.jsonl", rows)
    loaded = load_probe({folders.reward: 1.0}, [DataSource(data)], max_new_tokens=30)
    assert len(loaded.answers) == 8
    assert loaded.left_out == {"the honest answer is too long": 1}
    with pytest.raises(ValueError, match=r"^data: expected honest answers that fit, got none"):
        load_probe({folders.reward: 1.0}, [DataSource(data)], max_new_tokens=1)


def test_report_is_json_and_the_figure_names_every_cheat(answers: AnswerEncoder) -> None:
    probed = probe(answers, [characters])
    report = json.loads(json.dumps(probed.as_dict()))
    assert [row["name"] for row in report["results"]] == [r.name for r in probed.results]
    assert report["results"][0]["verdict"] == "gains"
    assert report["not_applicable"] == ["stock openings", "stock endings"]
    (axes,) = draw_probe(probed).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label.partition(" (")[0] for label in labels] == [r.name for r in probed.results]
