from tests.export.folders import runs

__all__ = ["runs"]
