from tests.models.conftest import causal_folder, family, folder, scalar_folder

__all__ = ["causal_folder", "family", "folder", "scalar_folder"]
