"""The model card of a saved model: how it was made."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from lightning.pytorch.utilities import rank_zero_warn

from lit_rlhf.files import code_versions

TITLES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "ppo": "PPO policy",
    "critic": "PPO critic",
}
OWNED_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_USAGE: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("card_usage.yaml").read_text("utf-8")
)
"""How to use each kind of model."""


@dataclass(frozen=True)
class ModelCardInfo:
    """How a model was made.

    `stage` is `sft`, `reward`, `ppo`, `critic`, or shown as it is; `base_model` a folder or hub id;
    `config` the run's settings, `metrics` its last ones, and `command` its command line. `note`
    warns users. `datasets` are hub ids, `files` names of other training data, `inputs` hashes and
    checksums of what was read. `updates` are the steps of all optimizers that were really made.
    """

    stage: str
    base_model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    command: str | None = None
    note: str | None = None
    datasets: Sequence[str] = ()
    files: Sequence[str] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    updates: int | None = None
    collapse: Mapping[str, Any] | None = None

    def manifest(self) -> dict[str, Any]:
        """The same for a folder's manifest, with versions; local paths by their last parts.

        `start` is what is taken over from the card of the base model.
        """
        # Names with an underscore are LightningCLI's own.
        config = {
            name: shorten_paths(value)
            for name, value in self.config.items()
            if not name.startswith("_") and name != "output_dir"
        }
        shortened = {
            "base_model": shorten_paths(self.base_model),
            "config": config,
            "command": self.command and _shorten_words(self.command),
            "start": read_card_data(self.base_model).to_dict(),  # type: ignore[no-untyped-call]
        }
        return {"made": asdict(self) | shortened, "versions": code_versions()}


def render_model_card(manifest: Mapping[str, Any], scalar: bool, chat: bool = True) -> str:
    """Render the README.md of a model folder from its manifest: Markdown after the hub's metadata.

    So a card says nothing that the manifest does not say.
    """
    made = manifest["made"]
    stage, start = made["stage"], made["start"]
    is_critic = stage == "critic"
    task = "text-classification" if scalar else "text-generation"
    datasets = list(dict.fromkeys([*start.get("datasets", []), *made["datasets"]]))
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=None if is_critic else task,
        tags=["rlhf", stage],
        base_model=start.get("base_model"),
        license=start.get("license"),
        datasets=datasets or None,
    )
    sections = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {TITLES.get(stage, stage)}",
        _describe_origin(made),
    ]
    if made["note"]:
        sections.append(f"**{made['note']}**")
    if is_critic:
        sections.append(f"## How to use\n\n{_USAGE['critic']}")
    elif chat:
        use = _USAGE["reward_model" if scalar else "language_model"]
        sections.append(f"## How to use\n\n{use}")
    if made["command"]:
        sections.append(f"## Command\n\n```\n{made['command']}\n```")
    metrics = {key: f"{value:.6g}" for key, value in made["metrics"].items()}
    if metrics:
        sections.append("## Metrics\n\n" + _render_table("metric", "value", metrics))
    if made["config"]:
        sections.append("## Settings\n\n" + _render_table("setting", "value", made["config"]))
    versions = _render_table("package", "version", manifest["versions"])
    sections.append("## Versions\n\n" + versions)
    return "\n\n".join(sections) + "\n"


def read_card_data(model: str) -> ModelCardData:
    """Read base model on the hub, licence and datasets from the card of a folder or hub id.

    Nothing is downloaded: of a hub id, which is itself the base model, a cached card is read.
    """
    folder, on_hub = Path(model), OWNED_HUB_ID.fullmatch(model)
    local = folder.exists()
    cached = try_to_load_from_cache(model, "README.md") if on_hub and not local else None
    file = folder / "README.md" if local else Path(cached) if isinstance(cached, str) else None
    data: Any = ModelCardData()
    if file is not None and file.is_file():
        try:
            data = ModelCard(file.read_text("utf-8"), ignore_metadata_errors=True).data
        except (ValueError, yaml.YAMLError) as error:
            rank_zero_warn(f"the metadata of the model card {file} cannot be read: {error}")
    return ModelCardData(
        # The hub refuses base models that are not on it, so a local folder stays out.
        base_model=data.base_model if local else model if on_hub else None,
        license=data.license,
        # Those of a model on the hub are its authors', who trained it on them.
        datasets=data.datasets if local else None,
    )


def shorten_paths(value: object) -> object:
    """Cut each local path in a setting to its last part; hub ids and URLs stay as they are.

    A string may be `--option=path`, and a mapping may have paths as keys.

    Examples:
        >>> shorten_paths("/home/me/runs/sft"), shorten_paths({"runs/hh/reward": 1.0})
        ('sft', {'reward': 1.0})
    """
    if isinstance(value, Mapping):
        return {shorten_paths(key): entry for key, entry in value.items()}
    if not isinstance(value, str):
        return value
    option, sign, path = value.rpartition("=")
    is_path = (
        "/" in path
        and "://" not in path
        and (path[0] in "/.~" or path.count("/") > 1 or Path(path).exists())
    )
    return f"{option}{sign}{Path(path).name}" if is_path else value


def _shorten_words(command: str) -> str:
    return " ".join(str(shorten_paths(word)) for word in command.split(" "))


def _describe_origin(made: Mapping[str, Any]) -> str:
    name = made["base_model"]
    stage = "ppo" if made["stage"] == "critic" else made["stage"]
    updates = "" if made["updates"] is None else f" in {made['updates']} updates"
    sentences = [f"Made by the `{stage}` stage of lit_rlhf from `{name}`{updates}."]
    base = made["start"].get("base_model")
    base = base if isinstance(base, str) else None
    if base is not None and base != name:
        sentences.append(f"The base model is `{base}`.")
    if data := [*made["datasets"], *made["files"]]:
        sentences.append(f"Training data: {', '.join(f'`{name}`' for name in data)}.")
    if base is not None:
        sentences.append("The licence of the base model applies, and those of the data.")
    return " ".join(sentences)


def _render_table(left: str, right: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|"]
    for key, value in rows.items():
        text = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{key}` | {text} |")
    return "\n".join(lines)
