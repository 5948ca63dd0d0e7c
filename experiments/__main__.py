"""`python -m experiments NAME ...`: the commands of an experiment."""

import runpy
import sys

if __name__ == "__main__":
    name = sys.argv.pop(1)
    runpy.run_module(f"experiments.{name}.study", run_name="__main__", alter_sys=True)
