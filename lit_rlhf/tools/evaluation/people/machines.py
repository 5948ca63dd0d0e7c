"""What rewards and a judge say about the responses that people labelled."""

import sys
from collections.abc import Sequence

import torch

from lit_rlhf.data import PromptExample
from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards import Rewards, Scores, WeightedReward, parse_rewards, split_rewards
from lit_rlhf.rewards.judge.comparing import Question
from lit_rlhf.tools.evaluation.judge.judge import Judge
from lit_rlhf.tools.evaluation.judge.options import JudgeOptions
from lit_rlhf.tools.evaluation.labels import Comparison, Label
from lit_rlhf.tools.evaluation.loading import CPU, load_shared_encoder
from lit_rlhf.tools.evaluation.output import progress_bar
from lit_rlhf.tools.evaluation.people.measure import Verdict
from lit_rlhf.tools.evaluation.reward_probe.answers import AnswerEncoder, Response
from lit_rlhf.tools.evaluation.reward_probe.cheats import Attempt
from lit_rlhf.tools.evaluation.reward_probe.scoring import score_encoded

_VERDICTS: dict[str, Verdict] = {"win": "b", "tie": "tie", "lose": "a"}


class PairScorer:
    """Scores both responses of comparisons with rewards.

    Args:
        rewards: Rewards with their weights, see `lit_rlhf.rewards.parse_rewards`.
        policy: Folder or hub id of a policy, whose tokenizer and template write the text. `None`:
            the first reward model's.
        model_options: How models are loaded.
        device: Where they compute.
        chat_template: Template of the dialogues; `tokenizer` for the policy's own.
        max_prompt_length: Longest prompt in tokens; see `load_shared_encoder`.
    """

    def __init__(
        self,
        rewards: Rewards,
        *,
        policy: str | None = None,
        model_options: ModelOptions = ModelOptions(),
        device: torch.device = CPU,
        chat_template: str = "tokenizer",
        max_prompt_length: int | None = None,
    ) -> None:
        self.device = device
        models = [spec.key for spec in parse_rewards(rewards) if spec.is_model]
        folder = policy or next(iter(models), None)
        if folder is None:
            raise ValueError(
                "policies: expected the folder of a policy, whose tokenizer and chat template "
                "write the responses, because no reward is a model; got only files of responses"
            )
        self._prompts = load_shared_encoder(
            [folder],
            chat_template=chat_template,
            max_prompt_length=max_prompt_length,
            model_options=model_options,
        )
        # people have read the whole responses
        self._answers = AnswerEncoder(self._prompts, positions=sys.maxsize)
        self.reward = WeightedReward(
            rewards, model_options, self._prompts.tokenizer, may_abstain=True
        ).eval()
        for model in self.reward.models:
            model.check_contract(self._prompts.contract)
        self.reward.to(self.device)

    def score(self, comparisons: Sequence[Comparison | Label], label: str) -> Scores:
        """Score the first responses of all comparisons, and then the second ones.

        Args:
            comparisons: The comparisons, `N` of them, at least one.
            label: Name of the progress bar.

        Returns:
            Scores of `2 N` responses.
        """
        prompts: list[PromptExample] = []
        responses: list[Response] = []
        for text, ended in (
            *((comparison.response_a, comparison.ended_a) for comparison in comparisons),
            *((comparison.response_b, comparison.ended_b) for comparison in comparisons),
        ):
            prompt = self._prompts.encode_prompt(
                comparisons[len(prompts) % len(comparisons)].prompt
            )
            prompts.append(prompt)
            attempt = Attempt(text, ended=ended is not False)
            responses.append(self._answers.encode(prompt, attempt))
        longest = max(
            len(prompt.input_ids) + len(response.ids)
            for prompt, response in zip(prompts, responses, strict=True)
        )
        self.reward.set_longest_sequence(longest)
        with progress_bar(label, len(prompts)) as progress:
            return score_encoded(
                self.reward,
                self._prompts,
                prompts,
                responses,
                device=self.device,
                report_progress=progress,
            )


def score_label_pairs(
    labels: Sequence[Label],
    rewards: Rewards,
    *,
    policy: str | None = None,
    model_options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
    tie_margin: float = 0.0,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
) -> dict[str, dict[str, Verdict]]:
    """Let each reward say which response is better.

    Args:
        labels: The labels, at least one.
        rewards: Rewards with their weights, see `lit_rlhf.rewards.parse_rewards`.
        policy: Folder or hub id of a policy, see `PairScorer`.
        model_options: How models are loaded.
        device: Where they compute.
        tie_margin: Largest difference of scores that counts as a tie, at least 0.
        chat_template: Template of the dialogues; `tokenizer` for the policy's own.
        max_prompt_length: Longest prompt in tokens; see `load_shared_encoder`.

    Returns:
        Verdicts by name of the reward and key of the comparison. Where a reward abstains there is
        none.
    """
    compared = _different(labels)
    verdicts: dict[str, dict[str, Verdict]] = {}
    for name, entry in split_rewards(rewards).items():
        scorer = PairScorer(
            entry,
            policy=policy,
            model_options=model_options,
            device=device,
            chat_template=chat_template,
            max_prompt_length=max_prompt_length,
        )
        scores = scorer.score(compared, f"labelled responses, {name}")
        totals = scores.total.double().tolist()
        (voted,) = (votes.tolist() for votes in scores.votes.values())
        verdicts[name] = {}
        for row, label in enumerate(compared):
            row_of_b = row + len(compared)
            if voted[row] and voted[row_of_b]:
                difference = totals[row_of_b] - totals[row]
                verdicts[name][label.comparison] = (
                    "b" if difference > tie_margin else "a" if difference < -tie_margin else "tie"
                )
    return verdicts


def judge_labels(labels: Sequence[Label], options: JudgeOptions) -> dict[str, dict[str, Verdict]]:
    """Let a judge say which response is better, in both orders.

    Args:
        labels: The labels, at least one.
        options: The judge, which must not be without `model`.

    Returns:
        Verdicts by criterion, as `judge: helpful`, and by key of the comparison. There is none
        where the judge's reply could not be read.
    """
    compared = _different(labels)
    questions = [
        Question(
            criterion=criterion,
            conversation=label.prompt,
            answer_a=label.response_b,  # as in `judge_policies`, so that its replies serve here too
            answer_b=label.response_a,
        )
        for criterion in options.criteria
        for label in compared
    ]
    with Judge(options) as judge:
        replies = judge.judge_pairs(questions, f"labelled responses, {options.model}")
    verdicts: dict[str, dict[str, Verdict]] = {}
    for question, label, reply in zip(
        questions, [*compared] * len(options.criteria), replies, strict=True
    ):
        of_criterion = verdicts.setdefault(f"judge: {question.criterion}", {})
        if reply.result != "invalid":
            of_criterion[label.comparison] = _VERDICTS[reply.result]
    return verdicts


def _different(labels: Sequence[Label]) -> list[Label]:
    """One label of each comparison."""
    return list({label.comparison: label for label in labels}.values())
