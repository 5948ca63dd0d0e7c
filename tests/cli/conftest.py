from tests.export.fixtures import runs, stage_root

__all__ = ["runs", "stage_root"]
