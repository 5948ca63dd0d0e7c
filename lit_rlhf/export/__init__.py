"""Export: from a checkpoint or a model's folder to a folder that other programs load.

    load_checkpoint_model("runs/ppo/checkpoints/batch=10.ckpt").save("runs/exported/policy")

`load_checkpoint_model`, `load_folder_model` and `load_gguf_model` return an `ExportableModel`. Its
`save` writes the folder that the finished stage would have left.
"""

from lit_rlhf.export.checkpoint import load_checkpoint_model as load_checkpoint_model
from lit_rlhf.export.folder import GGUF_SUFFIX as GGUF_SUFFIX
from lit_rlhf.export.folder import load_folder_model as load_folder_model
from lit_rlhf.export.folder import load_gguf_model as load_gguf_model
from lit_rlhf.export.model import ExportableModel as ExportableModel
from lit_rlhf.export.model import NetworkName as NetworkName
from lit_rlhf.export.model import average_models as average_models
from lit_rlhf.export.model import with_text_contract as with_text_contract
