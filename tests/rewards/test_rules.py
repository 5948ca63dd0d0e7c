"""The ready-made rules: their scores, and the arguments that they refuse."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from lit_rlhf.rewards import CallableReward, RewardError, SentimentRule, parse_rewards, rules
from lit_rlhf.rewards.rules import ContainsRule, EqualsRule, FormatRule, LengthRule, RegexRule
from tests.support.reward_inputs import make_rollouts
from tests.support.tiny_models import tiny_tokenizer

# no match, but every way to split the letters is tried, also by the regex package
CATASTROPHIC = r"(a|aa)+$"
ENDLESS = "a" * 60 + "b"


def scores(rule: Any, responses: Sequence[str], terminated: Sequence[bool] | None = None) -> Any:
    reward = CallableReward(rule, tiny_tokenizer(), label="the rule")
    return reward(make_rollouts(responses, terminated), ["p"] * len(responses), None).tolist()


def test_length_is_counted_in_tokens_words_or_characters() -> None:
    texts = ["yes", "no way  at all", ""]
    # byte-level: a token for each character here, and EOS where a response ended
    ended, tokenizer = [True, False, True], tiny_tokenizer()
    tokens = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    expected = [-float(n + end) for n, end in zip(tokens, ended, strict=True)]
    assert scores(LengthRule(longest=0), texts, ended) == expected
    assert scores(LengthRule(longest=1, unit="words"), texts, ended) == [0.0, -3.0, 0.0]
    assert scores(LengthRule(shortest=4, unit="characters"), texts, ended) == [-1.0, 0.0, -4.0]


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("sentence", None, ["Yes.", "Why? ", 'He said "no!"', "好的。", "(Done.)"], ["Yes", "a,"]),
        ("json", None, ['{"a": [1]}', " [] \n"], ["5", "{'a': 1}", "[NaN]", "[1", "", "[" * 10**5]),
        ("prefix", "Answer:", ["Answer: 4", "  Answer:"], ["answer: 4", "The Answer:"]),
        ("suffix", "Thanks", ["No. Thanks", "Thanks\n"], ["Thanks.", ""]),
    ],
)
def test_format_holds_or_not(kind: Any, text: str | None, good: list[str], bad: list[str]) -> None:
    assert FormatRule(kind, text)([], good + bad) == [1.0] * len(good) + [0.0] * len(bad)


def test_an_answer_is_equal_or_contained() -> None:
    responses = ["4", " 4\n", "It is 4.", "PARIS", ""]
    answer = [4, "4", "4", ["Lutetia", "Paris"], "x"]
    assert EqualsRule("answer")([""] * 5, responses, answer=answer) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert ContainsRule("answer")([""] * 5, responses, answer=answer) == [1.0, 1.0, 1.0, 0.0, 0.0]
    for rule in (EqualsRule("answer", ignore_case=True), ContainsRule("answer", ignore_case=True)):
        assert rule([""] * 5, responses, answer=answer)[3] == 1.0
    with pytest.raises(ValueError, match="the rule: expected records with the field 'answer'"):
        scores(EqualsRule("answer"), ["yes"])


def test_the_last_match_of_a_pattern_is_compared() -> None:
    rule = EqualsRule("gold", pattern=r"#### *(\d+)")
    responses = ["2 + 2 = 4 #### 4", "#### 3 no, #### 4", "#### 4 no, #### 3", "4"]
    for gold in ("4", "so it is\n#### 4"):
        assert rule([""] * 4, responses, gold=[gold] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert EqualsRule("gold", pattern=r"\d+")([""], ["it is 4"], gold=["4"]) == [1.0]


@pytest.mark.parametrize("rule", [EqualsRule("answer"), ContainsRule("answer")])
@pytest.mark.parametrize("value", ["", " ", [], [None]])
def test_a_record_without_an_answer_is_named(rule: Any, value: Any) -> None:
    with pytest.raises(RewardError, match=r"field 'answer': expected an answer .* the prompt 'q'"):
        rule(["q"], ["yes"], answer=[value])


def test_a_pattern_is_found_anywhere() -> None:
    responses = ["I'm sorry, no", "Sure!", "so SORRY", "a\nsorry"]
    assert scores(RegexRule(r"(?i)\bsorry\b"), responses) == [1.0, 0.0, 1.0, 1.0]
    assert scores(RegexRule(r"sorry", absent=True), responses) == [0.0, 1.0, 1.0, 0.0]
    assert scores(RegexRule("对"), ["对不起", "不"]) == [1.0, 0.0]


PATTERNS = [
    *(r"(?i)\bsorry\b", r"^(?:Answer|回答): ?\d+(?:[.,]\d{1,3})?$", r"(?m)^\s*[-*] "),
    *(r"\A```(\w*)\n", "(?s)<think>.*?</think>", r"([A-Za-z])\1{2,}", "(?P<q>['\\\"]).+(?P=q)"),
    *(r"\S+@\S+\.\w{2,}", r"https?://[^\s)\]]+", r"(?<!\d)\d{3}(?!\d)", r"(?<=\$)\d+"),
    *(r"[\u4e00-\u9fff]+", r"[^\x00-\x7f]", "(?i:STRASSE)", r"\N{DIGIT ONE}", r"(?a:\w+)!"),
    *("(?x) a  b # {comment}", "(a)?(?(1)b|c)", "a++b", "(?>a+)b", "a{,2}b", r"[\[\]]", "[]{}]"),
    *("x{}", "{", "a{1,2,3}", r"\{\}"),
    # braces that regex would read as an approximate match
    *(r"\\boxed{(.*?)}", r"\\frac{d}{dx}", "x{e}", r"\\text{s,d}", "x{i<=2}", r"\{{e}"),
]
TEXTS = [
    *("", "I'm sorry, no", "Answer: 42", "回答：42", "Answer: 4.5 or so", "- one\n* two"),
    *(
        "```py\n",
        "<think>a\nb</think> c",
        "soooo",
        "he said 'no'",
        "mail me@x.org",
        "see http://x.y/z)",
    ),
    *("$100", "对不起", "straße", "STRASSE", "1", "naïve!", "ab", "aab", "ac", "c", "[]", "{}"),
    *("x{}", "a{1,2,3}", "x{e}", r"\boxed{7}", r"\frac{d}{dx}", r"\frac{}{dx}", "xe", "x"),
    *(r"\text{s,d}", "x{i<=2}", "{{e}"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_to_re(pattern: str) -> None:
    expected = [float(re.search(pattern, text) is not None) for text in TEXTS]
    assert 0 < sum(expected) < len(TEXTS)
    assert RegexRule(pattern)([], TEXTS) == expected


def test_a_catastrophic_pattern_ends_with_an_error_that_shows_its_response() -> None:
    message = (
        f"the rule: pattern {CATASTROPHIC!r}: no result after 0.2 seconds (timeout) for the resp"
    )
    with pytest.raises(RewardError, match=re.escape(message)) as error:
        scores(RegexRule(CATASTROPHIC, timeout=0.2), ["fine", ENDLESS, "never reached"])
    assert repr(ENDLESS) in str(error.value)
    with pytest.raises(RewardError, match=r"no result after 0.05 seconds .timeout. for the"):
        EqualsRule("answer", CATASTROPHIC, timeout=0.05)(["p"], [ENDLESS], answer=["a"])


def test_the_time_limit_is_that_of_all_responses_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 10.5])
    monkeypatch.setattr(rules, "monotonic", lambda: next(clock))
    with pytest.raises(RewardError, match=r"after 10 seconds .timeout. for .* 'third'"):
        RegexRule("a")([], ["first", "second", "third"])


def test_the_time_limit_of_all_functions_holds_for_a_catastrophic_pattern_too() -> None:
    rule = RegexRule(CATASTROPHIC, timeout=1.0)
    reward = CallableReward(rule, tiny_tokenizer(), timeout=0.1, label="the rule")
    with pytest.raises(TimeoutError, match=r"the rule: no scores after 0\.1 seconds"):
        reward(make_rollouts([ENDLESS]), ["p"], None)


def test_sentiment_is_that_of_vader() -> None:
    pytest.importorskip("vaderSentiment", reason="needs the extra `sentiment`")
    texts = ["I love it, it is wonderful!", "A terrible day.", "It is not good.", "A table.", ""]
    cheerful, gloomy, negated, neutral, empty = scores(SentimentRule(), texts)
    assert 0.8 < cheerful <= 1.0
    assert -0.6 < gloomy < -0.4
    assert -0.5 < negated < -0.2
    assert neutral == empty == 0.0


def test_sentiment_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(ValueError, match=r"cheerful: expected .* \(pip install vaderSentiment\)"):
        parse_rewards({"cheerful": {"rule": "sentiment"}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthRule(), "shortest, longest: expected at least one of them, got neither"),
        (lambda: LengthRule(5, 3), "expected 0 <= shortest <= longest, got 5 and 3"),
        (lambda: LengthRule(-1), "expected 0 <= shortest <= longest, got -1 and None"),
        (lambda: FormatRule("prefix"), "text: expected a text for kind: prefix, got None"),
        (lambda: FormatRule("json", "x"), "text: expected none for kind: json, got 'x'"),
        (lambda: RegexRule("("), r"pattern: expected a regular expression of .*re, got '\('"),
        (lambda: RegexRule("[[:alpha:]]"), r"pattern: expected .*re, got .*Possible nested set"),
        (lambda: RegexRule(r"\p{L}"), r"pattern: expected .*re, got .*bad escape \\p"),
        (lambda: RegexRule("a", timeout=0), "timeout: expected a finite number > 0, got 0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
