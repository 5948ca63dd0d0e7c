"""Export: from a checkpoint or a model's folder to a folder that other programs load.

    load_checkpoint_model("runs/ppo/checkpoints/batch=10.ckpt").save("runs/exported/policy")

`load_checkpoint_model`, `load_folder_model` and `load_gguf_model` return an `ExportableModel`. Its
`save` writes the folder that the finished stage would have left.
"""

from lit_rlhf.export.checkpoint import load_checkpoint_model
from lit_rlhf.export.folder import load_folder_model
from lit_rlhf.export.gguf import GGUF_SUFFIX, load_gguf_model
from lit_rlhf.export.model import ExportableModel, NetworkName, with_text_contract

__all__ = [
    "GGUF_SUFFIX",
    "ExportableModel",
    "NetworkName",
    "load_checkpoint_model",
    "load_folder_model",
    "load_gguf_model",
    "with_text_contract",
]
