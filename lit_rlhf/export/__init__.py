"""Turning checkpoints and model folders into folders that other programs load."""

from lit_rlhf.export.checkpoint import Export, Network, NetworkName, export_checkpoint
from lit_rlhf.export.folder import export_folder, with_template

__all__ = [
    "Export",
    "Network",
    "NetworkName",
    "export_checkpoint",
    "export_folder",
    "with_template",
]
