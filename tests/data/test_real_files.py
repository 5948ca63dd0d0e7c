"""Public data files: how many records of each are kept, and why others are not."""

from pathlib import Path

import pytest

from lit_rlhf.data import DataSource, PreferenceDataModule, RecordKind
from tests.data.reading import read, read_good
from tests.data.tiny_tokenizers import tiny_tokenizer

EMPTY = "empty assistant turn"
TWICE = "two assistant turns in a row"
PROMPT = "chosen and rejected have different prompts"
EQUAL = "chosen and rejected are equal"
UNANSWERED = "missing, or no assistant turn at the end"

# Path, kind, records kept, records skipped by reason. HH-RLHF: some answers are empty, a few
# quote a whole dialogue (so a speaker has two turns in a row, or the halves' prompts differ), some
# pairs are equal. Belle: questions without a standard answer.
FILES: list[tuple[str, RecordKind, int, dict[str, int]]] = [
    ("hh_rlhf/harmless_base_test", "preference", 2299, {TWICE: 8, EMPTY: 4, PROMPT: 1}),
    ("hh_rlhf/harmless_base_test", "demonstration", 2300, {TWICE: 8, EMPTY: 4}),
    ("hh_rlhf/harmless_base_test", "prompt", 2304, {TWICE: 8}),
    ("hh_rlhf/helpful_base_test", "preference", 2333, {TWICE: 9, EMPTY: 4, PROMPT: 6, EQUAL: 2}),
    ("hh_rlhf/helpful_base_test", "demonstration", 2344, {TWICE: 9, EMPTY: 1}),
    ("hh_rlhf/helpful_base_test", "prompt", 2344, {TWICE: 9, EMPTY: 1}),
    (
        "hh_rlhf/helpful_rejection_sampled_test",
        "preference",
        2714,
        {EQUAL: 32, PROMPT: 2, TWICE: 1},
    ),
    ("hh_rlhf/helpful_rejection_sampled_test", "demonstration", 2748, {TWICE: 1}),
    ("hh_rlhf/helpful_rejection_sampled_test", "prompt", 2748, {TWICE: 1}),
    ("llamafactory_demo/dpo_en_demo", "preference", 300, {}),
    ("llamafactory_demo/dpo_en_demo", "demonstration", 300, {}),
    ("llamafactory_demo/dpo_en_demo", "prompt", 300, {}),
    ("llamafactory_demo/dpo_zh_demo", "preference", 300, {}),
    ("llamafactory_demo/dpo_zh_demo", "demonstration", 300, {}),
    ("llamafactory_demo/dpo_zh_demo", "prompt", 300, {}),
    ("llamafactory_demo/alpaca_en_demo", "demonstration", 999, {}),
    ("llamafactory_demo/alpaca_zh_demo", "demonstration", 1000, {}),
    ("gsm8k/train", "demonstration", 7473, {}),
    ("gsm8k/test", "demonstration", 1319, {}),
    ("dolly/dolly_3k", "demonstration", 2996, {}),
    ("self_instruct/seed_tasks", "demonstration", 175, {}),
    ("self_instruct/user_oriented_instructions", "demonstration", 252, {}),
    ("self_instruct/user_oriented_instructions", "prompt", 252, {}),
    ("cvalues/responsibility_prompts", "prompt", 664, {}),
    ("belle_eval/eval_set", "demonstration", 631, {EMPTY: 369}),
    ("belle_eval/eval_set", "prompt", 1000, {}),
    ("mmlu/mmlu", "demonstration", 14327, {}),
    ("safetybench/zh_subset", "demonstration", 2100, {}),
    ("text/gutenberg_nltk", "text", 14, {}),
    ("text/tang_poems_zh", "text", 20011, {}),
]
# A text file is one record.
TEXTS = {
    "tinyshakespeare": 1_115_394,
    "wikitext2_valid": 1_120_192,
    "wikitext2_test": 1_255_018,
    "wiki_demo": 1_026_454,
}


@pytest.mark.parametrize(("path", "kind", "kept", "skipped"), FILES)
def test_records_kept(
    shared_data: Path, path: str, kind: RecordKind, kept: int, skipped: dict[str, int]
) -> None:
    records, counts = read_good(kind, str(shared_data / f"{path}.jsonl.gz"))
    assert (len(records), counts.skipped) == (kept, skipped)


@pytest.mark.parametrize(("name", "characters"), TEXTS.items())
def test_texts(shared_data: Path, name: str, characters: int) -> None:
    (record,) = read("text", str(shared_data / f"text/{name}.txt.gz"))
    assert len(record.text) == characters


def test_every_file_is_in_the_tables(shared_data: Path) -> None:
    known = {f"{path}.jsonl.gz" for path, *_ in FILES} | {f"text/{name}.txt.gz" for name in TEXTS}
    assert {str(path.relative_to(shared_data)) for path in shared_data.rglob("*.gz")} == known


@pytest.mark.slow
def test_hh_pairs_become_batches(shared_data: Path) -> None:
    source = DataSource(str(shared_data / "hh_rlhf/harmless_base_test.jsonl.gz"))
    data = PreferenceDataModule(
        [source],
        val_fraction=0.1,
        tokenizer=tiny_tokenizer(pad=None),
        chat_template="hh",
        max_length=256,
        tokens_per_batch=4096,
        on_bad_record="skip",
    )
    data.setup("fit")
    batches = list(data.train_dataloader())
    kept = sum(len(batch.margin) for batch in batches) + len(data.examples["val"])
    assert kept + data.counts.dropped.total() == 2299
    assert max(batch.chosen.input_ids.shape[1] for batch in batches) <= 256
    assert data.counts.dropped_turns > 0
