"""The check that gradients are clipped under the strategy of the run."""

from __future__ import annotations

from lit_rlhf.doctor.case import Case, NetworkStep
from lit_rlhf.doctor.findings import Finding, failure, ok, warning
from lit_rlhf.doctor.iteration import NETWORKS


def clipping(case: Case) -> Finding:
    """Each network's optimizer uses a gradient within its bound where the raw one is not."""
    assert case.updates is not None
    strategy = type(case.trainer.strategy).__name__
    parts = []
    for network in NETWORKS:
        setting = f"model.{network}_optimizer.grad_clip"
        steps = [update.steps[network] for update in case.updates]
        if steps[0].bound is None:
            return warning(
                f"{setting} is null: gradients of the {network} are not clipped (here of norm "
                f"{steps[0].before:.2g}).",
                f"Set {setting}: 1.0, as in PPO-max, unless this is an ablation.",
            )
        step = next((s for s in steps if s.bound is not None and s.before > s.bound), None)
        if step is None or step.applied is None or step.bound is None:
            return warning(
                f"Whether gradients of the {network} are clipped cannot be seen: {_why(steps[-1])}",
                f"Watch ppo/{network}_grad_norm against {setting} in the run's first iterations.",
            )
        if not step.applied <= step.bound * (1 + case.tolerance(1e-3, 2e-2)):
            return failure(
                f"A gradient of norm {step.applied:.3g} reached the {network}'s optimizer, where "
                f"{step.bound:.3g} was the bound (before clipping {step.before:.3g}): clipping "
                f"does not act under {strategy}.",
                f"Clip by {setting} and lit_rlhf.strategies.clipped_step, not by the Trainer's "
                "gradient_clip_val, and take trainer.strategy auto, "
                "ddp_find_unused_parameters_true or multi_deepspeed_stage_2.",
            )
        lowered = "" if step is steps[0] else f", the bound being lowered to {step.bound:.3g}"
        parts.append(f"{network} from {step.before:.3g} to {step.applied:.3g}{lowered}")
    return ok(f"Under {strategy} a step clips gradient norms: {'; '.join(parts)}.")


def _why(step: NetworkStep) -> str:
    if step.applied is None:
        return "its optimizer is no Adam, whose moments tell the gradient."
    return f"its norm is {step.before:.2g}."
