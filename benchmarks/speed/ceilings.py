"""Measures the rates that this machine can reach, in its own process.

python -m benchmarks.speed.ceilings JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.speed.job import Job
from benchmarks.speed.machine import bf16_peak, matmul_ceiling, memory_bandwidth
from experiments.device import device_name


def main(job_file: str, result_file: str) -> None:
    """Measure on the job's device, with the job's threads, and write the result."""
    job = Job.load(Path(job_file))
    name = device_name(job.device)
    result = {
        "device": name,
        "flops_fp32": matmul_ceiling(torch.float32, job.device),
        "flops_fp32_onednn": (
            matmul_ceiling(torch.float32, "cpu", onednn=True) if job.device == "cpu" else None
        ),
        "flops_bf16": matmul_ceiling(torch.bfloat16, job.device),
        "bytes_per_second": memory_bandwidth(job.device),
        "peak_bf16": bf16_peak(name) if job.device == "cuda" else None,
    }
    Path(result_file).write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
