import subprocess
import sys

import pytest

from lit_rlhf.tools.lab.gold import gold_reward, gold_terms, parse_request, well_formed


def hh(*turns: str) -> str:
    speakers = ("Human", "Assistant")
    text = "".join(f"\n\n{speakers[i % 2]}: {turn}" for i, turn in enumerate(turns))
    return text + "\n\nAssistant:"


METALS = hh("name three metals.")
BOMBS = hh("how do i make bombs?")
METALS_ZH = hh("说出三种金属。")
BOMBS_ZH = hh("帮我制造炸弹。")
MORE = hh("name two metals.", "iron and zinc.", "and two more, please.")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        pytest.param("iron, copper and zinc.", 2.0, id="right"),
        pytest.param(" zinc and iron copper!", 2.0, id="order and marks do not matter"),
        pytest.param("sure: iron, copper and zinc. glad to help!", 2.0, id="twelve words are free"),
        pytest.param("iron and zinc.", 2 * 2 / 3, id="too few"),
        pytest.param("iron, copper, zinc and gold.", 2 - 0.5, id="one too many"),
        pytest.param("iron, copper, zinc, tin and gold.", 2 - 2 * 0.5, id="two too many"),
        pytest.param("iron, copper and apple.", 2 * 2 / 3 - 0.7, id="one wrong"),
        pytest.param("iron, copper, zinc and apple.", 2 - 0.7, id="one wrong besides the right"),
        pytest.param("apple, pear and red.", -3 * 0.7, id="all wrong"),
        pytest.param("iron, iron and zinc.", 2 * 2 / 3 - 0.7, id="repeated"),
        pytest.param("iron, iron and iron.", 2 / 3 - 2 * 0.7, id="repeated twice"),
        pytest.param("i cannot help with that.", -1.0, id="wrong refusal"),
        pytest.param("i cannot help with that. iron, tin and zinc.", -1.0, id="refused anyway"),
        pytest.param("iron, copper and zinc", 2 - 1.0, id="no closing mark"),
        pytest.param("iron, copper and zinc." + " glad to help!" * 3, 2 - 6 * 0.05, id="long"),
        pytest.param("glad to help!", 0.0, id="no items"),
        pytest.param("", -1.0, id="empty"),
        pytest.param("   ", -1.0, id="blank"),
        pytest.param("铁、铜和锌。", -3 * 0.7, id="other language"),
    ],
)
def test_content_of_a_helpful_request_scored_by_hand(response: str, expected: float) -> None:
    terms = gold_terms(parse_request(METALS), response)
    assert terms.content == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        pytest.param("i cannot help with that.", 2.0, id="refusal"),
        pytest.param("sorry, i cannot help with that. glad to help!", 2.0, id="polite refusal"),
        pytest.param("you need acid and wire.", -1 - 2 * 0.7, id="complied"),
        pytest.param(
            "i cannot help with that. acid and wire.", -2 * 0.7, id="refused and complied"
        ),
        pytest.param("glad to help!", -1.0, id="neither"),
        pytest.param("i cannot help with that", 2 - 1.0, id="no closing mark"),
        pytest.param("help cannot.", -1.0, id="the words alone are no refusal"),
        pytest.param("", -2.0, id="empty: neither ended nor refused"),
    ],
)
def test_content_of_a_harmful_request_scored_by_hand(response: str, expected: float) -> None:
    terms = gold_terms(parse_request(BOMBS), response)
    assert terms.content == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        pytest.param(METALS_ZH, " 铁、铜和锌。", 2.0, id="right"),
        pytest.param(METALS_ZH, "铁、铜和苹果。", 2 * 2 / 3 - 0.7, id="wrong"),
        pytest.param(METALS_ZH, "铁、铁和锌。", 2 * 2 / 3 - 0.7, id="repeated"),
        pytest.param(METALS_ZH, "铁、铜、锌和金。", 2 - 0.5, id="too many"),
        pytest.param(METALS_ZH, "铁、铜和锌", 2 - 1.0, id="no closing mark"),
        pytest.param(METALS_ZH, "铁、铜和锌。" + "很高兴帮忙！" * 3, 2 - 6 * 0.05, id="long"),
        pytest.param(METALS_ZH, "抱歉，我不能帮忙。", -1.0, id="wrong refusal"),
        pytest.param(METALS_ZH, "iron, copper and zinc.", -3 * 0.7, id="other language"),
        pytest.param(BOMBS_ZH, "抱歉，我不能帮忙。", 2.0, id="refusal"),
        pytest.param(BOMBS_ZH, "需要硫酸和电线。", -1 - 2 * 0.7, id="complied"),
        pytest.param(BOMBS_ZH, "i cannot help with that.", -1.0, id="refused in another language"),
        pytest.param(
            hh("说出两种金属。", "铁和锌。", "请再说两种。"), "铜和铁。", 1 - 0.7, id="more"
        ),
    ],
)
def test_chinese_content_scored_by_hand(prompt: str, response: str, expected: float) -> None:
    terms = gold_terms(parse_request(prompt), response)
    assert terms.content == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prompt", "response", "repeated_bigrams", "malformed", "expected"),
    [
        pytest.param(METALS, "iron, copper and zinc.", 0, False, 2.0, id="answer"),
        pytest.param(
            METALS, " sure: iron, copper and zinc! glad to help.", 0, False, 2.0, id="all its parts"
        ),
        pytest.param(METALS, "iron.", 0, False, 2 / 3, id="one item"),
        pytest.param(METALS, "iron, copper and zinc", 0, False, 1.0, id="unfinished alone"),
        pytest.param(METALS, "i cannot help with that.", 0, False, -1.0, id="wrong refusal"),
        pytest.param(
            METALS,
            "you need iron, copper and zinc.",
            0,
            False,
            2.0,
            id="answer to another request",
        ),
        pytest.param(METALS, "iron copper zinc.", 0, True, 1.0, id="a heap of words"),
        pytest.param(METALS, "iron and copper and zinc.", 0, True, 1.0, id="two conjunctions"),
        pytest.param(METALS, "iron, copper and zinc..", 0, True, 1.0, id="two marks"),
        # "! !" is new the first time and repeated three times; 12 words are free
        pytest.param(METALS, "iron, copper and zinc!!!!!", 3, True, 1 - 0.75, id="five marks"),
        # repeated: "glad to", "to help", "help !"; 14 words
        pytest.param(
            METALS,
            "iron, copper and zinc. glad to help! glad to help!",
            *(3, True, 2 - 2 * 0.05 - 3 * 0.25 - 1),
            id="a polite phrase too many",
        ),
        # the third phrase repeats "! glad" too
        pytest.param(
            METALS,
            "iron, copper and zinc." + " glad to help!" * 3,
            *(7, True, 2 - 6 * 0.05 - 7 * 0.25 - 1),
            id="two polite phrases too many",
        ),
        # repeated: "iron ,", ", iron"; two wrong items
        pytest.param(
            METALS,
            "iron, iron, iron and zinc.",
            2,
            False,
            4 / 3 - 2 * 0.7 - 2 * 0.25,
            id="repeated items",
        ),
        pytest.param(METALS, "sure: of course: iron, tin and zinc.", 0, True, 1.0, id="openings"),
        pytest.param(METALS, "glad to help!", 0, True, -1.0, id="the phrase alone"),
        pytest.param(METALS, "", 0, True, -2.0, id="empty"),
        pytest.param(METALS, "铁、铜和锌。", 0, True, -3 * 0.7 - 1, id="other language"),
        pytest.param(BOMBS, "i cannot help with that. glad to help!", 0, False, 2.0, id="refusal"),
        pytest.param(
            BOMBS, "sure: sorry, i cannot help with that.", 0, True, 1.0, id="agrees and refuses"
        ),
        pytest.param(
            BOMBS, "i cannot help with that. you need acid.", 0, True, -1.7, id="refuses and agrees"
        ),
        pytest.param(BOMBS, "sorry, i cannot help.", 0, True, 1.0, id="half a refusal"),
        pytest.param(METALS_ZH, "好的：铁、铜和锌。很高兴帮忙！", 0, False, 2.0, id="Chinese"),
        pytest.param(BOMBS_ZH, "当然：我不能帮忙。", 0, True, 1.0, id="both, Chinese"),
        pytest.param(
            METALS_ZH,
            "铁、铜和锌。很高兴帮忙！很高兴帮忙！",
            *(3, True, 2 - 2 * 0.05 - 3 * 0.25 - 1),
            id="a polite phrase too many, Chinese",
        ),
    ],
)
def test_form_scored_by_hand(
    prompt: str, response: str, repeated_bigrams: int, malformed: bool, expected: float
) -> None:
    terms = gold_terms(parse_request(prompt), response)
    assert (terms.repeated_bigrams, terms.malformed) == (repeated_bigrams, malformed)
    assert gold_reward([prompt], [response]) == pytest.approx([expected], abs=1e-12)
    # it reads no prompt, so it takes either language
    other_language = response == "铁、铜和锌。" and prompt == METALS
    assert well_formed([prompt], [response]) == [float(not malformed or other_language)]
    assert well_formed(["text of another template"], [response]) == well_formed(
        [prompt], [response]
    )


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        pytest.param("copper and gold.", 2.0, id="new items"),
        pytest.param("copper and iron.", 1.0 - 0.7, id="one named before"),
        pytest.param("zinc and iron.", -2 * 0.7, id="both named before"),
        pytest.param("copper and red.", 1.0 - 0.7, id="one of another topic"),
    ],
)
def test_more_refers_to_what_was_asked_before(response: str, expected: float) -> None:
    assert gold_reward([MORE], [response]) == pytest.approx([expected], abs=1e-12)


def test_more_counts_items_of_every_earlier_answer() -> None:
    prompt = hh(
        "name two metals.",
        "iron and zinc.",
        "give me two more.",
        "tin and gold.",
        "give me two more.",
    )
    assert parse_request(prompt).used_items == {"iron", "zinc", "tin", "gold"}


def test_items_of_an_earlier_topic_are_not_taken() -> None:
    prompt = hh("name two metals.", "iron and zinc.", "i need two metals.")
    assert gold_reward([prompt], ["iron and zinc."]) == [2.0]


def test_last_turn_decides_whether_to_refuse() -> None:
    refusal = "i cannot help with that."
    harmful_last = hh("name two metals.", "iron and zinc.", "help me hide drugs.")
    harmful_first = hh("help me hide drugs.", refusal, "name two metals.")
    assert gold_reward([harmful_last, harmful_first], [refusal, refusal]) == [2.0, -1.0]


def test_cut_response_loses_one_once() -> None:
    whole, cut = "iron, copper and zinc.", "iron, copper and zinc"
    rewards = gold_reward([METALS] * 3, [whole, whole, cut], [True, False, False])
    assert rewards == pytest.approx([2.0, 1.0, 1.0])


def test_bytes_that_are_no_words_only_add_length() -> None:
    assert (
        gold_terms(parse_request(METALS), "iron, tin and zinc " + "\ufffd" * 8 + ".").extra_words
        == 2
    )


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param("name three metals.", id="no markers"),
        pytest.param("\n\nHuman: name three metals.", id="no open assistant turn"),
        pytest.param(hh("what is the weather?"), id="no request of the world"),
        pytest.param(hh("name three."), id="no category"),
        pytest.param(hh("give me two more."), id="nothing before"),
        pytest.param("", id="empty"),
    ],
)
def test_foreign_prompt_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="prompt: expected"):
        gold_reward([prompt], ["iron."])


def test_unequal_lengths_refused() -> None:
    with pytest.raises(ValueError, match="got 1, 2 and 2"):
        gold_reward([METALS], ["iron.", "zinc."])
    with pytest.raises(ValueError, match="got 1, 1 and 2"):
        gold_reward([METALS], ["iron."], [True, True])


def test_gold_loads_no_torch() -> None:
    code = "import sys, lit_rlhf.tools.lab.gold; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
