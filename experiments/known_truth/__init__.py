"""Figure 4 on a pretrained model: PPO against a learned reward where a rule knows the truth.

    python -m experiments known_truth run BASE    # BASE: a folder with SmolLM2-135M-Instruct
    python -m experiments known_truth report

`report` writes `docs/known_truth.md` once a seed is complete. Needs the extra
`sentiment` and textblob (`pip install textblob`).
"""
