from tests.models.conftest import causal_folder, family, folder

__all__ = ["causal_folder", "family", "folder"]
