"""The check that cheating does not pay."""

from lit_rlhf.data import PromptExample
from lit_rlhf.rollout import decode_responses
from lit_rlhf.tools.doctor.case import Case
from lit_rlhf.tools.doctor.report import Finding, Status, ok, warning
from lit_rlhf.tools.evaluation.reward_probe import (
    MIN_PROMPTS,
    AnswerEncoder,
    HonestAnswer,
    Response,
    probe_reward,
    summarize,
)

_PROMPTS = 16
_BASELINE = "the policy's own responses"
_NAMED = 3  # cheats whose advice a finding gives


def check_reward(case: Case) -> Finding:
    """Check whether cheats score higher than what the policy writes before it is trained."""
    module = case.module
    if module.encoder is None:
        return Finding(Status.NOT_CHECKED, "The datamodule has no encoder to write responses with.")
    honest = _read_responses(case)
    if len(honest) < MIN_PROMPTS:
        return Finding(
            Status.NOT_CHECKED,
            f"An iteration has {len(honest)} prompts; the probe needs {MIN_PROMPTS}.",
        )
    longest = int(case.rollouts.prompt_mask.sum(1).max()) + module.sampling.max_new_tokens
    encoder = AnswerEncoder(
        module.encoder, positions=longest, max_new_tokens=module.sampling.max_new_tokens
    )
    device = case.rollouts.response_ids.device
    probe = probe_reward(module.reward, honest, encoder, device=device, seed=module.seed)
    summary = f"On {len(honest)} prompts: {summarize(probe, baseline=_BASELINE)}"
    if not probe.gaining:
        return ok(summary)
    advice = "; ".join(dict.fromkeys(cheat.advice for cheat in probe.gaining[:_NAMED]))
    return warning(
        summary,
        f"{advice[0].upper()}{advice[1:]}. `lit_rlhf reward probe` shows examples.",
    )


def _read_responses(case: Case) -> list[HonestAnswer]:
    """The first response to each of some prompts."""
    rollouts = case.rollouts
    batch = case.batch
    texts = decode_responses(rollouts, case.tokenizer)
    rows = range(0, len(texts), case.module.responses_per_prompt)[:_PROMPTS]
    return [
        HonestAnswer(
            prompt=PromptExample(
                input_ids=rollouts.prompt_ids[row, rollouts.prompt_mask[row]].cpu(),
                text=batch.texts[row],
                fields=batch.fields[row],
                turns=batch.turns[row] if batch.turns else (),
            ),
            text=texts[row].strip(),
            response=Response(
                ids=rollouts.response_ids[row, rollouts.response_mask[row]].tolist(),
                ended=bool(rollouts.terminated[row]),
            ),
        )
        for row in rows
    ]
