"""`lit_rlhf start`: configurations for one's own data, which the stages can run."""

from pathlib import Path

import pytest
import yaml

from lit_rlhf.cli.main import main
from lit_rlhf.data import DataSource, load_records, prompt_of, split_records
from tests.support.evaluation_folders import write_lines
from tests.support.stages import write_models

ROWS = [
    {"prompt": f"what is {n}?", "chosen": f"it is {n}", "rejected": "no idea"} for n in range(40)
]


def configuration(path: Path) -> dict[str, object]:
    loaded = yaml.safe_load(path.read_text("utf-8"))
    return {**loaded["model"]["init_args"], **loaded["data"]["init_args"]}


def test_pairs_get_3_stages(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{','.join(row.values())}\n" for row in [*ROWS, ROWS[0]])
    Path("pairs.csv").write_text(f"prompt,chosen,rejected\n{rows}")
    main(["start", "pairs.csv"])
    shown = capsys.readouterr().out
    assert "41 records that serve as preferences, 1 equal an earlier one" in shown
    assert "  | Human: what is 0?\n  | \n  | Assistant:[[ it is 0<|endoftext|>]]\n" in shown
    assert shown.count("\nrejected:\n") == 3
    stages = {name: configuration(Path(f"runs/pairs/{name}.yaml")) for name in ("sft", "ppo")}
    assert stages["sft"]["model_path"] == "runs/pairs/base"
    assert stages["sft"]["tokens_per_batch"] == 128  # 41 short rows: as long as one may be
    assert stages["ppo"]["model_path"] == stages["sft"]["output_dir"] == "runs/pairs/sft"
    reward = configuration(Path("runs/pairs/reward.yaml"))
    assert stages["ppo"]["rewards"] == {reward["output_dir"]: 1.0}
    for stage in ("sft", "reward", "ppo"):
        assert f"\n  lit_rlhf fit --config runs/pairs/{stage}.yaml\n" in shown
    # the prompts of the evaluation are those that the stages leave out
    records = load_records("prompt", [DataSource("pairs.csv")])
    held_out = load_records("prompt", [DataSource("runs/pairs/heldout.jsonl")])
    test = split_records(records, val_fraction=0.05, test_fraction=0.05, seed=0).test
    assert [prompt_of(r) for r in held_out] == [*dict.fromkeys(map(prompt_of, test))]
    trainer = yaml.safe_load(Path("runs/pairs/ppo.yaml").read_text("utf-8"))["trainer"]
    (timeline,) = (c for c in trainer["callbacks"] if "SampleTimeline" in c["class_path"])
    assert timeline["init_args"]["prompts"] == [prompt_of(record)[0].content for record in held_out]
    with pytest.raises(SystemExit, match="output_dir: expected a free name, got runs/pairs"):
        main(["start", "pairs.csv"])


def test_responses_get_sft_on_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_models(tmp_path)
    rows = [{"prompt": r["prompt"], "response": r["chosen"]} for r in ROWS]
    write_lines(tmp_path / "rows.jsonl", rows)
    main(["start", "rows.jsonl", "policy", "--output_dir", "mine"])
    assert "a reward model needs preferences" in capsys.readouterr().out
    assert configuration(Path("mine/sft.yaml"))["model_path"] == "policy"
    assert not Path("mine/ppo.yaml").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("prompt\na\n", r"pairs\.csv: .*missing, or no assistant turn .*the row has prompt"),
        ("prompt,chosen,rejected\na,b,c\n", "expected to leave prompts for training, .* of 1 "),
    ],
)
def test_a_file_that_does_not_serve_leaves_nothing_behind(table: str, message: str) -> None:
    Path("pairs.csv").write_text(table)
    with pytest.raises(SystemExit, match=message):
        main(["start", "pairs.csv"])
    assert not Path("runs").exists()
