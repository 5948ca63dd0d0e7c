"""The commands of `lit_rlhf` by name. Importing this module imports no library."""

STAGES = {
    "fit": "train a stage by a configuration, YAML or named",
    "validate": "evaluate a checkpoint on the validation data",
    "test": "evaluate a checkpoint on the test data",
}
"""Commands of the LightningCLI in `lit_rlhf.cli.training`."""
_UTILITIES = {
    "completion": "print a script that completes commands and options in a shell",
    "configs": "list or copy the configurations that come with lit_rlhf",
    "export": "turn a checkpoint or model into a folder that others load",
    "show": "what a model, checkpoint or evaluation was made from",
    "init": "make a small base model and tokenizer from your own text",
    "start": "write configurations of all stages for your own data",
}
"""Commands about configurations and models. Each is a module `lit_rlhf.cli.<name>`."""
_TOOLS = {
    "doctor": "check a PPO run before it starts",
    "evaluate": "compare policies on the same prompts",
    "generate": "responses to prompts, or a chat in the terminal",
    "lab": "write the built-in world, and label preferences in it",
    "label": "people compare responses in a browser",
    "quickstart": "train and compare all stages on the built-in world",
    "report": "put training runs side by side, or examine a reward model",
    "reward": "find wrong labels, and examine rewards by cheats and by RewardBench",
    "watch": "judge the logs of any trainer for a collapse",
}
"""Commands that look at what was trained. Each is a module `lit_rlhf.tools.commands.<name>`."""
COMMANDS = dict(sorted((_UTILITIES | _TOOLS).items()))
"""The commands besides the stages.

Their modules have `main(argv)`, or a `COMMAND` or a group of `COMMANDS` that needs nothing else.
"""


CONFIGURED = frozenset({*STAGES, "doctor"})
"""Commands that take the configurations of a stage."""
WITHOUT_MODELS = frozenset({"completion", "configs", "quickstart", "show", "watch"})
"""Commands that neither load nor save a model themselves."""


def module_of(name: str) -> str:
    """Name of the module of a command."""
    if name in STAGES:
        return "lit_rlhf.cli.training"
    return f"lit_rlhf.tools.commands.{name}" if name in _TOOLS else f"lit_rlhf.cli.{name}"
