"""What the speed benchmarks share; `workload`, `machine` and `peer_*` need no lit_rlhf."""
