from tests.export.fixtures import runs

__all__ = ["runs"]
