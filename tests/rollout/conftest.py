from tests.models.conftest import family

__all__ = ["family"]
