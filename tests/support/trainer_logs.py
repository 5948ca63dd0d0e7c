"""Metrics of steps that a detector calls healthy and collapsed."""

CALM = {"kl": 0.01, "completions/mean_length": 50.0, "entropy": 2.0}


FAR = {"kl": 0.4, "completions/mean_length": 150.0, "entropy": 0.5}
