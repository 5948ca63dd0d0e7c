from tests.support.model_folders import causal_folder, family, folder, scalar_folder

__all__ = ["causal_folder", "family", "folder", "scalar_folder"]
