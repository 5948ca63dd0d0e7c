"""Reads configurations like the command line, but builds nothing from them."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lit_rlhf.cli.training import RLHFCLI, run_cli
from tests.support.tiny_runs import CONFIGS

BASES = sorted(
    path
    for folder in ("quickstart", "sft", "reward", "ppo", "smollm2", "examples")
    for path in (CONFIGS / folder).glob("*.yaml")
    if path.name != "ppo_vanilla.yaml"  # an overlay of ppo_max.yaml
)
OVERLAYS = sorted((CONFIGS / "overlays").glob("*.yaml"))
ABLATIONS = sorted((CONFIGS / "ablations").glob("*.yaml"))
OF_THE_QUICKSTART = ("earlier_reward_model", "long_run", "policy_without_sft", "ptx")
"""Ablations with folders or sizes of the quickstart; the others fit any configuration."""
REWARD_ABLATIONS = [path for path in ABLATIONS if path.stem == "earlier_reward_model"]
"""Ablations of reward modelling; the others are of PPO."""
PPO_ABLATIONS = [path for path in ABLATIONS if path not in REWARD_ABLATIONS]


class _ParserBuiltError(Exception):
    def __init__(self, parser: LightningArgumentParser) -> None:
        self.parser = parser


@cache
def cli_parser() -> LightningArgumentParser:
    """The parser that `lit_rlhf` makes; to make it takes longer than to parse with it."""

    def stop(self: RLHFCLI, parser: LightningArgumentParser, args: ArgsType) -> None:
        raise _ParserBuiltError(parser)

    with patch.object(RLHFCLI, "parse_arguments", stop):
        try:
            run_cli()
        except _ParserBuiltError as built:
            return built.parser
    raise AssertionError("run_cli made no parser")


@cache
def parse_configs(*configs: Path) -> Mapping[str, Any]:
    """The settings of `lit_rlhf fit` with configurations, the last one winning, by dotted key."""
    files = (part for config in configs for part in ("--config", str(config)))
    settings = cli_parser().parse_args(["fit", *files]).fit.as_dict()
    del settings["config"]  # the files' names
    return flat(settings)


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Keys that only one of the two has, or whose values differ."""
    return {key for key in before.keys() | after if before.get(key) != after.get(key)}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dictionaries by dotted key; lists are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def stage_of(config: Path) -> str:
    """`sft`, `reward` or `ppo`."""
    folder = config.parent.name
    if folder == "examples":
        return "ppo"
    return config.stem.partition("_")[0] if folder in ("quickstart", "smollm2") else folder


def name_of(config: Path) -> str:
    """For test ids: `ppo/hh_cpu`."""
    return f"{config.parent.name}/{config.stem}"
