"""Tools that look at a run or a model: the doctor, evaluation, the lab, and their commands.

Nothing that trains imports this package.
"""
