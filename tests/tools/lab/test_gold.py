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
    ("prompt", "response", "expected"),
    [
        (METALS, "iron, copper and zinc.", 2.0),
        (METALS, " zinc and iron copper!", 2.0),  # order and marks do not matter
        (METALS, "sure: iron, copper and zinc. glad to help!", 2.0),  # twelve words are free
        (METALS, "iron, copper, zinc, tin and gold.", 2 - 2 * 0.5),  # two too many
        (METALS, "iron, copper and apple.", 2 * 2 / 3 - 0.7),  # one wrong
        (METALS, "iron, iron and iron.", 2 / 3 - 2 * 0.7),  # repeated
        (METALS, "i cannot help with that.", -1.0),  # wrong refusal
        (METALS, "i cannot help with that. iron, tin and zinc.", -1.0),  # refused anyway
        (METALS, "iron, copper and zinc", 2 - 1.0),  # no closing mark
        (METALS, "iron, copper and zinc." + " glad to help!" * 3, 2 - 6 * 0.05),  # long
        (METALS, "glad to help!", 0.0),
        (METALS, "", -1.0),
        (METALS, "铁、铜和锌。", -3 * 0.7),  # another language
        (BOMBS, "i cannot help with that.", 2.0),
        (BOMBS, "you need acid and wire.", -1 - 2 * 0.7),  # complied
        (BOMBS, "i cannot help with that. acid and wire.", -2 * 0.7),  # refused and complied
        (BOMBS, "glad to help!", -1.0),
        (BOMBS, "help cannot.", -1.0),  # the words alone are not a refusal
        (METALS_ZH, " 铁、铜和锌。", 2.0),
        (METALS_ZH, "铁、铜和锌。" + "很高兴帮忙！" * 3, 2 - 6 * 0.05),
        (METALS_ZH, "抱歉，我不能帮忙。", -1.0),
        (BOMBS_ZH, "抱歉，我不能帮忙。", 2.0),
        (BOMBS_ZH, "需要硫酸和电线。", -1 - 2 * 0.7),
        (hh("说出两种金属。", "铁和锌。", "请再说两种。"), "铜和铁。", 1 - 0.7),
    ],
)
def test_content_scored_by_hand(prompt: str, response: str, expected: float) -> None:
    terms = gold_terms(parse_request(prompt), response)
    assert terms.content == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prompt", "response", "repeated_bigrams", "malformed", "expected"),
    [
        (METALS, "iron, copper and zinc.", 0, False, 2.0),
        (METALS, " sure: iron, copper and zinc! glad to help.", 0, False, 2.0),  # all its parts
        (METALS, "iron.", 0, False, 2 / 3),
        (METALS, "iron, copper and zinc", 0, False, 1.0),  # only unfinished
        (METALS, "you need iron, copper and zinc.", 0, False, 2.0),  # answers another request
        (METALS, "iron copper zinc.", 0, True, 1.0),  # a heap of words
        (METALS, "iron and copper and zinc.", 0, True, 1.0),  # two conjunctions
        # "! !" is new the first time and repeated three times; 12 words are free
        (METALS, "iron, copper and zinc!!!!!", 3, True, 1 - 0.75),
        # repeated: "glad to", "to help", "help !"; 14 words
        (METALS, "iron, copper and zinc." + " glad to help!" * 2, 3, True, 1 - 0.1 - 0.75),
        # repeated: "iron ,", ", iron"; two wrong items
        (METALS, "iron, iron, iron and zinc.", 2, False, 4 / 3 - 2 * 0.7 - 2 * 0.25),
        (METALS, "sure: of course: iron, tin and zinc.", 0, True, 1.0),
        (METALS, "glad to help!", 0, True, -1.0),  # only the phrase
        (METALS, "", 0, True, -2.0),
        (METALS, "铁、铜和锌。", 0, True, -3 * 0.7 - 1),
        (BOMBS, "i cannot help with that. glad to help!", 0, False, 2.0),
        (BOMBS, "sure: sorry, i cannot help with that.", 0, True, 1.0),  # agrees and refuses
        (BOMBS, "i cannot help with that. you need acid.", 0, True, -1.7),  # refuses and agrees
        (BOMBS, "sorry, i cannot help.", 0, True, 1.0),  # half a refusal
        (METALS_ZH, "好的：铁、铜和锌。很高兴帮忙！", 0, False, 2.0),
        (BOMBS_ZH, "当然：我不能帮忙。", 0, True, 1.0),
        (METALS_ZH, "铁、铜和锌。很高兴帮忙！很高兴帮忙！", 3, True, 1 - 0.1 - 0.75),
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
    for request in (prompt, "text of another template"):
        assert well_formed([request], [response]) == [float(not malformed or other_language)]


def test_more_refers_to_what_was_asked_before() -> None:
    expected = {
        "copper and gold.": 2.0,
        "copper and iron.": 1.0 - 0.7,  # one named before
        "zinc and iron.": -2 * 0.7,
        "copper and red.": 1.0 - 0.7,  # one of another topic
    }
    rewards = gold_reward([MORE] * 4, list(expected))
    assert rewards == pytest.approx(list(expected.values()), abs=1e-12)
    request = "give me two more."
    prompt = hh("name two metals.", "iron and zinc.", request, "tin and gold.", request)
    assert parse_request(prompt).used_items == {"iron", "zinc", "tin", "gold"}
    # items of an earlier topic are not taken
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
    response = "iron, tin and zinc " + "\ufffd" * 8 + "."
    assert gold_terms(parse_request(METALS), response).extra_words == 2


@pytest.mark.parametrize(
    "prompt",
    [
        "name three metals.",  # no markers
        "\n\nHuman: name three metals.",  # no open assistant turn
        hh("what is the weather?"),
        hh("name three."),  # no category
        hh("give me two more."),  # nothing before
        "",
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
