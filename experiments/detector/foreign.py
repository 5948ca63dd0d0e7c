"""Public logs of other people's runs, which lie outside of the repository.

The folder is `foreign_logs` in the one that the environment variable `LIT_RLHF_TEST_DATA` names.
Only the verdicts are committed. Labels are what the authors say of their runs, or what their own
measures of the truth show.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from experiments.detector.families import CHAT, CHECKABLE, Trajectory
from experiments.detector.labels import Label, Question
from lit_callbacks.names import find_names
from lit_callbacks.verdict import Trouble

DATA_VARIABLE = "LIT_RLHF_TEST_DATA"
FOLDER = "foreign_logs"
HARM = frozenset({Question.HARM})


class ForeignLog(NamedTuple):
    """A log of someone else's run.

    Attributes:
        file: Its name in the folder.
        source: Repository on GitHub and the commit.
        run: What was trained.
        trouble: Its trouble; `None` for a run in which no harm is known.
        says: Who says so, and what.
        responses: Responses in a step; 0 if that is not known.
        task: Preset of the detector that a user would choose.
        keys: Names of its metrics by the monitors' keys, besides those that are recognized.
    """

    file: str
    source: str
    run: str
    trouble: Trouble | None
    says: str
    responses: int = 0
    task: str = CHECKABLE
    keys: tuple[tuple[str, str], ...] = ()


CASCADE = "shatianming5/goodhart-cascade@e696a8f"
CURVES_KEYS = (
    ("rollout/kl_per_token", "kl"),
    ("rollout/truncation_rate", "clipped_ratio"),
    ("rollout/score", "reward"),
)
ENTROPY = "rohunagrawal/reward-hacking-entropy@a45643e"
ENTROPY_KEYS = (("rollout/entropy", "policy/entropy"), ("rollout/score", "reward/mean"))
LOGS = (
    ForeignLog(
        file="tsushanth_hh_ppo_run1.jsonl",
        source="tsushanth/rlhf-lab@e4a8301",
        run="TRL's old PPOTrainer, Qwen2.5-1.5B, HH-RLHF",
        trouble=Trouble.BROKEN,
        says="its author's comments: KL -20 to -3400, reward -0.4 to -4.8",
        task=CHAT,
        keys=(("rollout/kl", "objective/kl"), ("rollout/score", "env/reward_mean")),
    ),
    ForeignLog(
        file="shatianming_curves_7B_R4_v2.jsonl",
        source=CASCADE,
        run="TRL's GRPO on code, 7B",
        trouble=Trouble.EXPLOITING,
        says="its author: comments grow from 0.4 to 24 %; pass@1 is not harmed",
        keys=CURVES_KEYS,
    ),
    ForeignLog(
        file="shatianming_curves_7B_R1_v2.jsonl",
        source=CASCADE,
        run="TRL's GRPO on code, 7B",
        trouble=None,
        says="held-out pass@1",
        keys=CURVES_KEYS,
    ),
    ForeignLog(
        file="shatianming_curves_1.5B_R1_v2.jsonl",
        source=CASCADE,
        run="TRL's GRPO on code, 1.5B",
        trouble=None,
        says="held-out pass@1",
        keys=CURVES_KEYS,
    ),
    ForeignLog(
        file="shatianming_code_grpo_1.5B_Ropt.jsonl",
        source=CASCADE,
        run="TRL's GRPO on code, 1.5B",
        trouble=None,
        says="held-out pass@1 0.12 to 0.11; comments grow from 48 to 57 %",
        keys=(("rollout/score", "reward"),),
    ),
    ForeignLog(
        file="rohun_leetcode_rl-leetcode_meta-llama_Llama-3.2-3B_g_Easy.jsonl",
        source=ENTROPY,
        run="policy gradient on LeetCode, Llama 3.2 3B",
        trouble=None,
        says="tests that pass: 0.002 to 0.016",
        keys=ENTROPY_KEYS,
    ),
    ForeignLog(
        file="rohun_leetcode_rl-leetcode_meta-llama_Llama-3.2-3B_f_g_Hard.jsonl",
        source=ENTROPY,
        run="policy gradient on LeetCode, Llama 3.2 3B",
        trouble=None,
        says="tests that pass: 0.000 to 0.002",
        keys=ENTROPY_KEYS,
    ),
    ForeignLog(
        file="danielduongg_bandit_dynamics.jsonl",
        source="danielduongg/reward-hacking-lab@8a5e788",
        run="a bandit, no language model",
        trouble=Trouble.EXPLOITING,
        says="its gold reward: 0 to 1.07 to 0.76",
        keys=(("rollout/kl", "kl"), ("rollout/score", "proxy")),
    ),
)


def foreign_folder() -> Path | None:
    """Folder of the logs; `None` if the environment does not name one that has them."""
    root = os.environ.get(DATA_VARIABLE)
    folder = Path(root) / FOLDER if root else None
    return folder if folder is not None and folder.is_dir() else None


def foreign_runs(folder: Path) -> list[Trajectory]:
    """Read the logs of other people.

    Args:
        folder: Their folder.
    """
    return [read_foreign(folder, log) for log in LOGS]


def read_foreign(folder: Path, log: ForeignLog) -> Trajectory:
    """Read one log, with its metrics under the monitors' keys.

    Args:
        folder: Folder of the log.
        log: What is known of it.
    """
    lines = [json.loads(line) for line in (folder / log.file).read_text("utf-8").splitlines()]
    names = {**find_names(key for line in lines for key in line), **dict(log.keys)}
    steps = [
        {key: float(line[name]) for key, name in names.items() if line.get(name) is not None}
        | {"rollout/responses": float(log.responses)}
        for line in lines
    ]
    troubles = frozenset({log.trouble} if log.trouble else ())
    label = Label(troubles, HARM)
    return Trajectory("logs of other people", log.file, label, steps, task=log.task)
