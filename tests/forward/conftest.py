from tests.models.conftest import causal_folder, family, folder, scalar_folder
from tests.modules.conftest import root

__all__ = ["causal_folder", "family", "folder", "root", "scalar_folder"]
