"""One row of each published dataset, in its own fields and with made-up text.

In every row `GOOD` is preferred to `BAD`, and both answer `ASK`. Fields that carry no text for
training, such as the annotations of a row, are left out where there are many.
"""

from typing import Any, NamedTuple

from lit_rlhf.data import RecordKind

ASK, GOOD, BAD = "Which metal rusts?", "Iron rusts.", "No metal does."
BE_BRIEF = "Be brief."
_USER = {"role": "user", "content": ASK}
_GOOD, _BAD = ({"role": "assistant", "content": text} for text in (GOOD, BAD))


class PublishedRow(NamedTuple):
    """A row of a dataset.

    Attributes:
        fields: The row.
        kinds: What it serves as.
        settings: Fields of the data source beside `path`.
        margin: The field whose absolute value is the margin of the pair, if there is one.
    """

    fields: Any
    kinds: tuple[RecordKind, ...] = ("preference", "demonstration", "prompt")
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    margin: str = ""


PUBLISHED: dict[str, PublishedRow] = {
    "Anthropic/hh-rlhf": PublishedRow(
        {
            "chosen": f"\n\nHuman: {ASK}\n\nAssistant: {GOOD}",
            "rejected": f"\n\nHuman: {ASK}\n\nAssistant: {BAD}",
        }
    ),
    "HuggingFaceH4/ultrafeedback_binarized": PublishedRow(
        {
            "prompt": ASK,
            "prompt_id": "0a1b",
            "chosen": [_USER, _GOOD],
            "rejected": [_USER, _BAD],
            "messages": [_USER, _GOOD],
            "score_chosen": 8.0,
            "score_rejected": 3.0,
        }
    ),
    "openbmb/UltraFeedback": PublishedRow(
        {
            "source": "evol_instruct",
            "instruction": ASK,
            "models": ["alpaca-7b"],
            "completions": [{"model": "alpaca-7b", "response": GOOD, "overall_score": 8.0}],
            "correct_answers": ["None"],
            "incorrect_answers": ["None"],
        },
        ("prompt",),
    ),
    "stanfordnlp/SHP": PublishedRow(
        {
            "post_id": "x1",
            "domain": "askscience_train",
            "upvote_ratio": 0.9,
            "history": ASK,
            "c_root_id_A": "a",
            "c_root_id_B": "b",
            "score_A": 3,
            "score_B": 9,
            "human_ref_A": BAD,
            "human_ref_B": GOOD,
            "labels": 0,
            "score_ratio": 3.0,
        }
    ),
    "openai/summarize_from_feedback": PublishedRow(
        {
            "info": {
                "id": "t3_1",
                "post": ASK,
                "title": "Metals",
                "subreddit": "askscience",
                "site": None,
                "article": None,
            },
            "summaries": [
                {"text": BAD, "policy": "sup1", "note": ""},
                {"text": GOOD, "policy": "ref", "note": ""},
            ],
            "choice": 1,
            "worker": "w",
            "batch": "batch3",
            "split": "train",
            "extra": {"confidence": 7},
        }
    ),
    "OpenAssistant/oasst1 (trees)": PublishedRow(
        {
            "message_tree_id": "m0",
            "tree_state": "ready_for_export",
            "prompt": {
                "message_id": "m0",
                "text": ASK,
                "role": "prompter",
                "lang": "en",
                "replies": [
                    {"text": BAD, "role": "assistant", "rank": 1, "replies": []},
                    {"text": GOOD, "role": "assistant", "rank": 0, "replies": []},
                ],
            },
        },
        settings={"map": "my_maps:best_and_worst"},
    ),
    "nvidia/HelpSteer2 (preference)": PublishedRow(
        {
            "split": "train",
            "prompt": ASK,
            "response_1": BAD,
            "response_2": GOOD,
            "preference_strength": 2,
            "preference_statement": "Response 2 is right.",
        },
        margin="preference_strength",
    ),
    "PKU-Alignment/PKU-SafeRLHF": PublishedRow(
        {
            "prompt": ASK,
            "response_0": GOOD,
            "response_1": BAD,
            "is_response_0_safe": True,
            "is_response_1_safe": True,
            "better_response_id": 0,
            "safer_response_id": 1,
        }
    ),
    "Intel/orca_dpo_pairs": PublishedRow(
        {"system": BE_BRIEF, "question": ASK, "chosen": GOOD, "rejected": BAD}
    ),
    "argilla/distilabel-intel-orca-dpo-pairs": PublishedRow(
        {
            "system": BE_BRIEF,
            "input": ASK,
            "chosen": GOOD,
            "rejected": BAD,
            "generations": [GOOD, BAD],
            "rating": [9.0, 2.0],
        }
    ),
    "argilla/dpo-mix-7k": PublishedRow(
        {
            "dataset": "argilla/ultrafeedback",
            "chosen": [_USER, _GOOD],
            "rejected": [_USER, _BAD],
            "chosen_rating": 5.0,
            "rejected_rating": 3.0,
        }
    ),
    "trl-lib/ultrafeedback_binarized": PublishedRow(
        {
            "chosen": [_USER, _GOOD],
            "rejected": [_USER, _BAD],
            "score_chosen": 8.0,
            "score_rejected": 3.0,
        }
    ),
    "trl-lib/hh-rlhf-helpful-base": PublishedRow(
        {"prompt": [_USER], "chosen": [_GOOD], "rejected": [_BAD]}
    ),
    "trl-lib/tldr-preference": PublishedRow({"prompt": ASK, "chosen": GOOD, "rejected": BAD}),
    "trl-lib/tldr": PublishedRow({"prompt": ASK, "completion": GOOD}, ("demonstration", "prompt")),
    "trl-lib/kto-mix-14k": PublishedRow(
        {"prompt": [_USER], "completion": [_GOOD], "label": True}, ("demonstration", "prompt")
    ),
    "trl-lib/Capybara": PublishedRow(
        {"source": "GOAT", "messages": [_USER, _GOOD], "num_turns": 2}, ("demonstration", "prompt")
    ),
    "trl-lib/ultrafeedback-prompt": PublishedRow({"prompt": [_USER]}, ("prompt",)),
    "CValues-Comparison": PublishedRow(
        {"prompt": ASK, "pos_resp": GOOD, "neg_resp": BAD},
        settings={"columns": {"chosen": "pos_resp", "rejected": "neg_resp"}},
    ),
    "dikw/hh_rlhf_cn": PublishedRow(
        {
            "context": [{"role": "human", "text": ASK}],
            "chosen": {"role": "assistant", "text": GOOD},
            "rejected": {"role": "assistant", "text": BAD},
        },
        settings={"columns": {"prompt": "context"}},
    ),
    "LLaMA-Factory, Alpaca preferences": PublishedRow(
        {"instruction": ASK, "input": "", "chosen": GOOD, "rejected": BAD}
    ),
    "MOSS-RLHF, `train.json` of PPO": PublishedRow([ASK, GOOD], ("demonstration", "prompt")),
    "MOSS-RLHF, reward data": PublishedRow({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}),
}
