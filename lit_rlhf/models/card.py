"""The model card of a saved model: how it was made."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, try_to_load_from_cache
from jinja2 import StrictUndefined, Template

from lit_rlhf.files import code_versions
from lit_rlhf.rank_zero import rank_zero_warn
from lit_rlhf.yaml_loading import load_yaml

TITLES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "ppo": "PPO policy",
    "critic": "PPO critic",
}
MAX_CARD = 2**20  # bytes of a card that are read
_METADATA = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_INHERITED = ("base_model", "license", "datasets")
OWNED_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelCardInfo:
    """Facts about how a model was made.

    Attributes:
        stage: `sft`, `reward`, `ppo` or `critic`; any other text is shown as it is.
        base_model: Folder or hub id of the model that training started from.
        config: The run's settings.
        metrics: The run's last metrics.
        command: The run's command line.
        datasets: Hub ids of the training data.
        files: Names of other training data.
        inputs: Hashes and checksums of what was read.
        updates: Number of optimizer steps that were made, over all optimizers.
        collapse: How a detector of collapse ended the run, and which weights were saved.
        best: Metric, score and updates of the best checkpoint, if its weights were saved.
        held_out: How good the model is on held-out data, in a line; `None` if that is not known.
    """

    stage: str
    base_model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    command: str | None = None
    datasets: Sequence[str] = ()
    files: Sequence[str] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    updates: int | None = None
    collapse: Mapping[str, Any] | None = None
    best: Mapping[str, Any] | None = None
    held_out: str | None = None

    def manifest(self) -> dict[str, Any]:
        """The content of a folder's manifest: these attributes, and versions of the code.

        Local paths are cut to their last parts. `start` is what is taken over from the card of the
        base model.
        """
        # Names with an underscore are LightningCLI's own.
        config = {
            name: shorten_paths(value)
            for name, value in self.config.items()
            if not name.startswith("_") and name != "output_dir"
        }
        command = self.command
        if command is not None:
            command = " ".join(str(shorten_paths(word)) for word in command.split(" "))
        shortened = {
            "base_model": shorten_paths(self.base_model),
            "config": config,
            "command": command,
            "start": read_card_data(self.base_model).to_dict(),  # type: ignore[no-untyped-call]
        }
        return {"made": asdict(self) | shortened, "versions": code_versions()}


def render_model_card(manifest: Mapping[str, Any], *, scalar: bool, chat: bool = True) -> str:
    """Render a model folder's README.md: Markdown after the hub's metadata.

    Args:
        manifest: The folder's manifest.
        scalar: Whether the model is a scalar model, as opposed to a language model.
        chat: Whether its tokenizer has a chat template, which the example then uses.
    """
    origin = manifest["made"]
    stage = origin["stage"]
    start = origin["start"]
    datasets = list(dict.fromkeys([*start.get("datasets", []), *origin["datasets"]]))
    task = "text-classification" if scalar else "text-generation"
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=None if stage == "critic" else task,
        tags=["rlhf", stage],
        base_model=start.get("base_model"),
        license=start.get("license"),
        datasets=datasets or None,
    )
    values = {
        "title": TITLES.get(stage, stage),
        "metadata": metadata.to_yaml(),
        "metrics": {key: f"{value:.6g}" for key, value in origin["metrics"].items()},
        "versions": manifest["versions"],
    }
    # manifests of older versions lack these
    variables = {"best": None, "held_out": None, **origin, **values}
    return _load_template().render(variables, scalar=scalar, chat=chat)


@cache
def _load_template() -> Template:
    template: Template = Template(  # its constructor is typed as Any
        Path(__file__).with_name("card.md.jinja").read_text("utf-8"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return template


def read_card_data(model: str) -> ModelCardData:
    """Read base model on the hub, licence and datasets from the card of a folder or hub id.

    Nothing is downloaded: for a hub id, which is itself the base model, a cached card is read.
    """
    if Path(model).exists():
        # The hub refuses base models that are not on it, so the folder itself stays out.
        return ModelCardData(**_find_metadata(Path(model) / "README.md"))
    if not OWNED_HUB_ID.fullmatch(model):
        return ModelCardData()
    cached = try_to_load_from_cache(model, "README.md")
    metadata = _find_metadata(Path(cached)) if isinstance(cached, str) else {}
    # The card of a model on the hub names as datasets what its authors trained it on.
    return ModelCardData(base_model=model, license=metadata.get("license"))


def _find_metadata(file: Path) -> dict[str, Any]:
    """Read the metadata of a card; empty if there is none, or with a warning if it is damaged."""
    if not file.is_file():
        return {}
    try:
        return _read_metadata(file)
    except (ValueError, yaml.YAMLError) as error:
        rank_zero_warn(f"the metadata of the model card {file} cannot be read: {error}")
        return {}


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


def _read_metadata(file: Path) -> dict[str, Any]:
    """Read what a card of anybody says of base model, licence and datasets.

    Args:
        file: The card.

    Raises:
        yaml.YAMLError: If its metadata are no YAML, or take long to read.
        ValueError: If they are not what the hub has there.
    """
    with file.open("rb") as card:
        block = _METADATA.match(card.read(MAX_CARD).decode("utf-8"))
    metadata = load_yaml(block[1]) if block else {}
    if not isinstance(metadata, dict):
        raise ValueError(f"expected names and values, got {type(metadata).__name__}")
    inherited = {name: metadata.get(name) for name in _INHERITED}
    for name, value in inherited.items():
        texts = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name}: expected text or a list of texts")
    return inherited
