"""The paper's figures and claims on the built-in world, each from runs over several seeds.

`table` has the runs and figures as data, `claims` the statements with the rules of their verdicts.
`running` trains what is missing, `measuring` turns a run into a small JSON file, and `drawing` and
`page` make the figures and docs/reproduction.md from these files.
"""
