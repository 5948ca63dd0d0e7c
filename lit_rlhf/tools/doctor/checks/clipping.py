"""The check that gradients are clipped under the run's strategy."""

from lit_rlhf.tools.doctor.case import Case
from lit_rlhf.tools.doctor.report import Finding, failure, ok, warning


def check_clipping(case: Case) -> Finding:
    """Check that a gradient above the bound reaches each network's optimizer clipped."""
    strategy = type(case.trainer.strategy).__name__
    parts = []
    for network in case.updates[0]:
        option = f"model.{network}_optimizer.grad_clip"
        steps = [update[network] for update in case.updates]
        if steps[0].clip is None:
            return warning(
                f"{option} is null: gradients of the {network} are not clipped (here of norm "
                f"{steps[0].norm:.2g}).",
                f"Set {option}: 1.0, as in PPO-max, unless this is an ablation.",
            )
        step = next((s for s in steps if s.clip is not None and s.norm > s.clip), None)
        if step is None or step.applied_norm is None or step.clip is None:
            reason = (
                "its optimizer is not Adam, whose moments show the gradient"
                if steps[-1].applied_norm is None
                else f"its norm is {steps[-1].norm:.2g}"
            )
            return warning(
                f"It cannot be told whether gradients of the {network} are clipped: {reason}.",
                f"Watch ppo/{network}_grad_norm against {option} in the run's first iterations.",
            )
        if not step.applied_norm <= step.clip * (1 + case.tolerance(full=1e-3, low=2e-2)):
            return failure(
                f"A gradient of norm {step.applied_norm:.3g} reached the {network}'s optimizer, "
                f"above the bound of {step.clip:.3g} (before clipping {step.norm:.3g}): clipping "
                f"does not act under {strategy}.",
                f"Clip with {option} and lit_rlhf.strategies.clipped_step, not with the Trainer's "
                "gradient_clip_val, and use trainer.strategy auto, ddp or multi_deepspeed_stage_2.",
            )
        lowered = "" if step is steps[0] else f" with the bound lowered to {step.clip:.3g}"
        parts.append(f"{network} from {step.norm:.3g} to {step.applied_norm:.3g}{lowered}")
    return ok(f"{strategy} clips gradient norms: {'; '.join(parts)}.")
