from tests.support.model_folders import causal_folder

__all__ = ["causal_folder"]
