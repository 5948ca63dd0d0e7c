"""Shared parts of the speed benchmarks.

TRL's environment, which lacks lit_rlhf, imports `workload`, `job`, `machine` and `peer_*` only.
"""
