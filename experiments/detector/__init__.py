"""The collapse detector on families of runs, beside a threshold on KL and six rules on rewards.

`criterion` says which families choose thresholds, which judge, and what is demanded. It was
committed before the first results.
"""
