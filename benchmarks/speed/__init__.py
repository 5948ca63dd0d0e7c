"""What the speed benchmarks share.

TRL's environment, which lacks lit_rlhf, imports `workload`, `job`, `machine` and `peer_*` alone.
"""
