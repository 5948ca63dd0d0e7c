"""`lit_rlhf`: LightningCLI for the training stages, and the tools beside it."""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from transformers.utils import logging as transformers_logging

# Each is `lit_rlhf.cli.<name>` with `main(argv)`; imported when called, so that `fit` starts fast.
TOOLS = {
    "evaluate": "compare policies on the same prompts",
    "lab": "write the built-in world, and label preferences in it",
    "plot": "draw how PPO runs went",
    "quickstart": "train and compare all stages on the built-in world",
}


class RLHFCLI(LightningCLI):
    """LightningCLI whose configuration and flags win over what a checkpoint remembers."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and refuse a checkpoint of another class before anything is loaded from it."""
        super().parse_arguments(parser, args)
        if self.config.get("subcommand"):
            self._read_tensors_only(parser, self.config[self.config["subcommand"]])
        # LightningCLI merges the checkpoint's hyper-parameters over the configuration next.
        self._given = self.config.clone()
        subcommand = self.config.get("subcommand")
        given = self.config[subcommand] if subcommand else self.config
        if given.get("ckpt_path") and Path(given.ckpt_path).is_file():
            check_checkpoint_class(parser, given.ckpt_path, given.model.class_path)

    @staticmethod
    def _read_tensors_only(parser: LightningArgumentParser, given: Namespace) -> None:
        """Have checkpoints read without running code from them, also those behind a URL."""
        if given.weights_only is False:
            parser.error(
                "--weights_only false would run code that a checkpoint brings along. If you trust "
                "it, load it in Python: Trainer.fit(..., weights_only=False)"
            )
        given.weights_only = True

    def before_instantiate_classes(self) -> None:
        """Go back to the configuration as given."""
        self.config = self._given


def check_checkpoint_class(parser: LightningArgumentParser, path: str, configured: str) -> None:
    """End with a usage error when the checkpoint at `path` is not of class `configured`."""
    try:
        checkpoint = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except pickle.UnpicklingError as error:
        parser.error(
            f"--ckpt_path {path} holds more than tensors and plain data, which could run code when "
            f"it is read: {error}"
        )
    saved = checkpoint.get("hyper_parameters", {}).get("_class_path", configured)
    if saved.rpartition(".")[2] != configured.rpartition(".")[2]:
        parser.error(
            f"--ckpt_path {path} is a checkpoint of {saved}, but the configuration trains "
            f"{configured}. --ckpt_path resumes a run of the same class; to start a stage from an "
            "earlier one, point --model.model_path at the folder that the earlier stage left."
        )


def run_cli(args: ArgsType = None) -> RLHFCLI:
    """Run a LightningCLI command (`fit`, `validate`, `test`, `predict`) with `args`."""
    import lit_callbacks  # noqa: F401  # short names of callbacks in configurations
    import lit_rlhf.data
    import lit_rlhf.modules  # noqa: F401  # short names of modules and data

    return RLHFCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        args=args,
        parser_kwargs={"description": __doc__, "prog": "lit_rlhf"},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    # Loading and saving take no time worth a bar; the terminal belongs to the stages' own.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    if arguments[0] in TOOLS:
        importlib.import_module(f"lit_rlhf.cli.{arguments[0]}").main(arguments[1:])
    else:
        # LightningCLI warns of arguments beside sys.argv; a tool that calls us means its own.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        run_cli(arguments)


def usage() -> str:
    """The commands there are."""
    stages = {
        "fit": "train a stage: lit_rlhf fit --config configs/quickstart/sft.yaml",
        "validate": "evaluate a checkpoint on the validation data",
        "test": "evaluate a checkpoint on the test data",
        "predict": "run a checkpoint's predict_step",
    }
    lines = [f"  {name:<12}{text}" for name, text in (stages | TOOLS).items()]
    return "\n".join(
        ["usage: lit_rlhf COMMAND [OPTIONS]", "", *lines, "", "lit_rlhf COMMAND --help tells more."]
    )


if __name__ == "__main__":
    main()
