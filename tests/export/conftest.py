from tests.support.exported_runs import runs

__all__ = ["runs"]
