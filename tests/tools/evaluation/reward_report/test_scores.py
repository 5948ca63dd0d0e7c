"""Scores and log-probs of pairs, against loops over single, unpadded rows."""

import math
from pathlib import Path

import pytest
import torch

from lit_rlhf.data import DataSource, DialogueEncoder, Message
from lit_rlhf.models import load_causal_lm, load_scalar_model, load_tokenizer, save_model_folder
from lit_rlhf.tools.evaluation.reward_report import measure_reward_model, score_pairs
from tests.support.evaluation_folders import write_lines, write_policy, write_reward
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

PAIRS = [
    ("hi", "well, hello to you", "no"),
    ("name two", "iron", "iron and zinc, I would say"),
    ("why?", "so", "because it is what it is"),
    ("make tea", "boil water first", "tea"),
    ("ok", "a", "b"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sft`, `reward` without and `trained` with an output layer, and pairs; read only."""
    folder = tmp_path_factory.mktemp("reward_scores")
    write_policy(folder / "sft", seed=0)
    write_reward(folder / "reward", str(folder / "sft"))
    tokenizer = tiny_tokenizer()
    encoder = DialogueEncoder(tokenizer, "hh", max_length=64)
    trained = load_scalar_model(folder / "sft", head_seed=2)
    head = tiny_causal_lm(seed=5).get_output_embeddings()  # type: ignore[no-untyped-call]
    extra = {"contract": encoder.contract, "lm_head": head.state_dict()}
    save_model_folder(trained, tokenizer, folder / "trained", **extra)
    records = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
    write_lines(folder / "a.jsonl", records[:3])
    write_lines(folder / "b.jsonl", records[3:])
    return folder


def sources(root: Path) -> list[DataSource]:
    return [DataSource(str(root / "a.jsonl")), DataSource(str(root / "b.jsonl"))]


def rows(root: Path, chosen: bool) -> list[tuple[list[int], int]]:
    """Ids of each dialogue, and how many of them are the response."""
    encoder = DialogueEncoder(load_tokenizer(root / "sft"), "hh", 64)
    scored_rows = []
    for prompt, good, bad in PAIRS:
        turns = [Message("user", prompt), Message("assistant", good if chosen else bad)]
        encoded = encoder.encode_dialogue(turns)
        scored_rows.append((encoded.input_ids.tolist(), int(encoded.completion_mask.sum())))
    return scored_rows


def expected_scores(root: Path, model: str, chosen: bool) -> list[float]:
    scorer = load_scalar_model(root / model).eval()
    scores = []
    for ids, _ in rows(root, chosen):
        with torch.no_grad():
            state = scorer.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            scores.append(float(scorer.score(state)))
    return scores


def expected_logprobs(root: Path, trunk: str, head: torch.nn.Module) -> list[float]:
    """Sums over the chosen responses' tokens, in float64."""
    model = load_scalar_model(root / trunk).eval()
    sums = []
    for ids, length in rows(root, chosen=True):
        with torch.no_grad():
            states = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            logprobs = head(states).double().log_softmax(-1)
        first = len(ids) - length
        sums.append(sum(float(logprobs[t - 1, ids[t]]) for t in range(first, len(ids))))
    return sums


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_and_lengths_stay_with_their_pairs(root: Path, batch_size: int) -> None:
    pairs = score_pairs(str(root / "reward"), sources(root), batch_size=batch_size)
    assert [record.chosen for record in pairs.records] == [chosen for _, chosen, _ in PAIRS]
    assert [record.source for record in pairs.records] == ["a", "a", "a", "b", "b"]
    assert pairs.chosen == pytest.approx(expected_scores(root, "reward", True), abs=1e-5)
    assert pairs.rejected == pytest.approx(expected_scores(root, "reward", False), abs=1e-5)
    assert pairs.chosen_lengths.tolist() == [n for _, n in rows(root, chosen=True)]
    assert pairs.rejected_lengths.tolist() == [n for _, n in rows(root, chosen=False)]


def test_the_trunk_is_read_with_the_output_layer_it_was_trained_with(root: Path) -> None:
    pairs = score_pairs(str(root / "trained"), sources(root))
    head = tiny_causal_lm(seed=5).get_output_embeddings()  # type: ignore[no-untyped-call]
    expected = expected_logprobs(root, "trained", head)
    assert list(pairs.logprobs) == ["reward model"]
    assert pairs.logprobs["reward model"] == pytest.approx(expected, rel=1e-5)
    report = measure_reward_model("m", {}, pairs).perplexity["reward model"]
    tokens = [n for _, n in rows(root, chosen=True)]
    assert report["all"] == pytest.approx(math.exp(-sum(expected) / sum(tokens)))
    of_b = math.exp(-sum(expected[3:]) / sum(tokens[3:]))
    assert report["by_source"]["b"] == pytest.approx(of_b)
    # a language model that is read along does not lend its own
    beside = score_pairs(str(root / "trained"), sources(root), language_model=str(root / "sft"))
    assert pairs.lm_head == beside.lm_head == str(root / "trained")
    assert beside.logprobs["reward model"] != pytest.approx(beside.logprobs["language model"])


def test_a_language_model_is_read_along_and_lends_its_output_layer(root: Path) -> None:
    pairs = score_pairs(str(root / "reward"), sources(root), language_model=str(root / "sft"))
    # the trunks of both are equal here
    head = load_causal_lm(root / "sft").get_output_embeddings()
    expected = expected_logprobs(root, "reward", head)
    assert pairs.logprobs["reward model"] == pytest.approx(expected, rel=1e-5)
    assert pairs.logprobs["language model"] == pytest.approx(expected, rel=1e-5)
    assert pairs.lm_head == str(root / "sft")


def test_without_an_output_layer_there_is_no_perplexity(root: Path) -> None:
    pairs = score_pairs(str(root / "reward"), sources(root), max_pairs=1)
    assert pairs.logprobs == {}
    assert measure_reward_model("m", {}, pairs).perplexity == {}
    assert [record.source for record in pairs.records] == ["a", "b"]  # one of each


def test_pairs_that_do_not_fit_are_left_out_and_counted(root: Path) -> None:
    # "no" and the prompt fit; the long responses do not
    pairs = score_pairs(str(root / "reward"), sources(root), max_length=20)
    assert 0 < len(pairs.records) < len(PAIRS)
    assert pairs.left_out.total() == len(PAIRS) - len(pairs.records)
    with pytest.raises(ValueError, match="expected pairs of at most 2 tokens"):
        score_pairs(str(root / "reward"), sources(root), max_length=2)


def test_a_language_model_is_not_a_reward_model(root: Path) -> None:
    with pytest.raises(ValueError, match="expected a reward model, got the language model"):
        score_pairs(str(root / "sft"), sources(root))


def test_a_score_that_is_not_finite_is_named(root: Path, tmp_path: Path) -> None:
    model = load_scalar_model(root / "reward")
    torch.nn.init.constant_(model.score.weight, 3e38)  # products of it are not finite
    encoder = DialogueEncoder(load_tokenizer(root / "sft"), "hh", 64)
    save_model_folder(model, encoder.tokenizer, tmp_path / "bad", contract=encoder.contract)
    with pytest.raises(ValueError, match=r"expected finite scores.*a\.jsonl:1; 5 of 5"):
        score_pairs(str(tmp_path / "bad"), sources(root))


def test_a_language_model_of_another_text_is_refused(root: Path, tmp_path: Path) -> None:
    other = write_policy(tmp_path / "other", template="paper-en")
    with pytest.raises(ValueError, match="the chat templates differ"):
        score_pairs(str(root / "reward"), sources(root), language_model=other)
