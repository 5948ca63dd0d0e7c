"""lit_rlhf: reinforcement learning from human feedback (SFT, reward model, PPO-max) on Lightning.

Importing this package loads nothing but the version; import the subpackage that is needed.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
