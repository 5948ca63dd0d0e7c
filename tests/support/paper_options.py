"""Options of PPO-max with the values of the paper."""

PPO_MAX = {
    "policy_optimizer.learning_rate": 5e-7,  # Section 5.1
    "critic_optimizer.learning_rate": 1.65e-6,
    "policy_optimizer.warmup_ratio": 0.1,
    "minibatches.minibatch_size": 32,
    "critic_pretraining.iterations": 25,  # Section 5.3.3
    "critic_init": "reward",  # Section 5.4
    "loss.ptx_coef": 0.1,
    "loss.value_clip": 0.2,
    "policy_optimizer.grad_clip": 1.0,
    "critic_optimizer.grad_clip": 1.0,
    "reward_shaping.normalization": True,
    "reward_shaping.scaling": False,
    "reward_shaping.clip": 0.8,  # Section 5.3.1
    "reward_shaping.kl_coef": 0.05,  # Section 5.3.2
    "reward_shaping.kl_estimator": "k1",
    "advantages.lam": 0.9,  # Appendix C.3
    "advantages.normalization": False,  # Figure 5
    "advantages.clip": None,
    "sampling.max_new_tokens": 512,  # Figure 6
    "sampling.temperature": 1.0,
    "loss.policy_objective": "clip",  # Figure 5
    "loss.old_policy": "rollout",
    "loss.entropy_coef": 0.0,
}
"""What the paper states of PPO-max, and the overlays of `configs/ablations` change."""
