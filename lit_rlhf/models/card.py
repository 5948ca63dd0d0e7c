"""The model card of a saved model: how it was made."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

TITLES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "ppo": "PPO policy",
    "critic": "PPO critic",
}
OWNED_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PACKAGES = ("lit-rlhf", "torch", "lightning", "transformers", "peft")


@dataclass(frozen=True)
class ModelCardInfo:
    """How a model was made.

    Attributes:
        stage: `sft`, `reward` or `ppo`; any other name is shown as it is.
        base_model: Folder or hub id that the stage started from.
        config: Settings of the run.
        metrics: Final metrics, by key.
        command: Command line of the run, if there was one.
        note: What a user has to know about the model above all.
    """

    stage: str
    base_model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    command: str | None = None
    note: str | None = None


def render_model_card(info: ModelCardInfo, scalar: bool) -> str:
    """Render the README.md of a model folder: Markdown after the hub's metadata block.

    Args:
        info: How the model was made.
        scalar: Whether it is a scalar model rather than a language model.
    """
    # The hub refuses base models that are not on it, so a local folder stays out of the metadata.
    on_hub = OWNED_HUB_ID.fullmatch(info.base_model) and not Path(info.base_model).exists()
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification" if scalar else "text-generation",
        tags=["rlhf", info.stage],
        base_model=info.base_model if on_hub else None,
    )
    loader = "AutoModelForSequenceClassification" if scalar else "AutoModelForCausalLM"
    sections = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {TITLES.get(info.stage, info.stage)}",
        f"Made by the `{info.stage}` stage of lit_rlhf from `{info.base_model}`. "
        f"Plain transformers loads it with `{loader}`.",
    ]
    if info.note:
        sections.append(f"**{info.note}**")
    if scalar:
        sections.append(
            "The score of a dialogue is the single logit at its last token, EOS included."
        )
    if info.command:
        sections.append(f"## Command\n\n```\n{info.command}\n```")
    if info.metrics:
        metrics = {key: f"{value:.6g}" for key, value in info.metrics.items()}
        sections.append("## Metrics\n\n" + _render_table("metric", "value", metrics))
    if info.config:
        sections.append("## Settings\n\n" + _render_table("setting", "value", info.config))
    versions = _render_table("package", "version", _installed_versions())
    sections.append("## Versions\n\n" + versions)
    return "\n\n".join(sections) + "\n"


def _render_table(left: str, right: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|"]
    for key, value in rows.items():
        text = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{key}` | {text} |")
    return "\n".join(lines)


def _installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
