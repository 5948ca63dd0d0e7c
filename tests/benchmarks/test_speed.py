"""The benchmark of speed: the machine, counts of operations, equal work, tables and pages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed import machine, report, workload
from benchmarks.speed.flops import (
    generation_bytes,
    layer_weights,
    stage_flops,
    trunk_flops,
    update_flops,
)
from benchmarks.speed.job import Job
from benchmarks.speed.machine import TICKS_PER_SECOND, Clocks, busy_seconds, foreign_cores
from benchmarks.speed.ours import build_loader, run
from benchmarks.speed.ours_supervised import build_batches, lengths
from benchmarks.speed.report import quiet_updates
from benchmarks.speed.workload import Workload

TINY = Workload(**workload.SIZES["tiny"])

# --- foreign load and memory, from faked texts of /proc

#        user nice system idle iowait irq softirq steal guest guest_nice
STAT = "cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 1\n"


def test_busy_time_leaves_idle_and_waiting_out_and_counts_guests_once() -> None:
    assert busy_seconds(STAT) * TICKS_PER_SECOND == 100 + 20 + 30 + 6 + 7 + 8


def test_foreign_load_is_what_this_process_did_not_use() -> None:
    # ten seconds: the machine was busy for 17, of which this process used 14
    start, end = Clocks(100.0, 5.0, 1000.0), Clocks(110.0, 19.0, 1017.0)
    assert foreign_cores(start, end) == pytest.approx(0.3)


def test_waiting_ends_with_the_first_quiet_window(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([Clocks(0, 0, 0), Clocks(4, 0, 6), Clocks(4, 0, 6), Clocks(8, 0, 6.2)])
    monkeypatch.setattr(machine, "read_clocks", lambda: next(moments))
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    assert machine.wait_until_quiet(limit=60) == pytest.approx(0.05)


def test_memory_is_read_from_the_processs_status() -> None:
    text = "Name:\tpython\nVmPeak:\t  99 kB\nVmHWM:\t  2048 kB\n"
    assert machine.status_kib(text, "VmHWM") == 2048


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Intel(R) Xeon(R) Processor", "intel_xeon"),
        ("AMD EPYC", "amd_epyc"),
        ("Intel(R) Core(TM) i7-1185G7 CPU @ 3.00GHz", "intel_core_i7_1185g7"),
    ],
)
def test_folder_of_results_is_the_name_of_the_device(name: str, folder: str) -> None:
    assert machine.folder_name(name) == folder


def test_folder_of_a_processors_results_names_its_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "device_name", lambda device: "AMD EPYC")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    output = Path(report.default_output("sft_reward", device="cpu", size="135m"))
    assert output == report.RESULTS / "amd_epyc_avx2" / "sft_reward_135m"
    assert Path(report.default_output("a", device="cuda", size="5m")).parent.name == "amd_epyc"


def test_kernels_are_recorded_with_what_changes_their_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    kernels = machine.kernels()
    assert kernels["capability"] == torch.backends.cpu.get_cpu_capability()
    assert kernels["threads"] == torch.get_num_threads()
    assert any(name.startswith("libtorch_cpu") for name in kernels["libraries"])
    assert kernels["variables"]["GOMP_SPINCOUNT"] == "10000"


def run_with(*loads: float) -> dict[str, object]:
    return {"updates": [{"seconds": 1.0, "foreign_cores": load} for load in loads]}


def test_updates_with_foreign_load_are_dropped() -> None:
    used = quiet_updates([run_with(0.0, 0.2), run_with(0.05, 0.051)], "case")
    assert [update["foreign_cores"] for update in used] == [0.0, 0.05]


def test_case_without_a_quiet_update_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"TRL, full: expected .* 0.05 .* got 0.20 at least"):
        quiet_updates([run_with(0.4, 0.2)], "TRL, full")


# --- counts of operations, by hand

# width of keys and values 4; a layer: 8*8 (q) + 2*8*4 (k, v) + 8*8 (o) + 3*8*12 = 480
SMALL = Workload(hidden=8, layers=2, heads=2, kv_heads=1, intermediate=12, vocab=16)


def test_counted_weights_match_the_network() -> None:
    layers = workload.policy_network(SMALL).get_submodule("model.layers")
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    assert layer_weights(SMALL) == matrices


def test_trunks_forward_pass() -> None:
    # 3 tokens: 2 * 960 * 3 products; 6 pairs, each 2 products of width 8 in 2 layers
    assert trunk_flops(SMALL, 3) == 5760 + 6 * (2 * 2 * 8) * 2


def test_update_with_one_response() -> None:
    # prompt 2, response 2: three tokens are fed to policy and critic, four to the reward model
    trunk_of_3 = 5760 + 384
    trunk_of_4 = 2 * 960 * 4 + 10 * 64
    policy = trunk_of_3 + 2 * (2 * 8 * 16)
    critic = trunk_of_3 + 2 * (2 * 8)
    reward = trunk_of_4 + 2 * 8
    flops = update_flops(SMALL, [2], [2])
    assert flops.rollout == policy
    assert flops.score == policy + critic + reward
    assert flops.update == 3 * policy + 3 * critic
    assert flops.total == 5 * policy + 4 * critic + reward


def counted_by_torch(model: torch.nn.Module, ids: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(ids)
    counts = counter.get_flop_counts()["Global"].items()
    # Products of batches have no weights: rotary frequencies times positions in older
    # releases of transformers, and of attention, which is none of its own in torch 2.8.
    apart = ("attention", "bmm")
    return sum(count for name, count in counts if not any(a in str(name) for a in apart))


def test_torch_counts_the_same_products() -> None:
    ids = torch.arange(4).unsqueeze(0) + 3
    attention = 10 * 64  # ten pairs, as above
    # five tokens of a prompt and a response: the last is not fed, four logits are used
    forward = stage_flops("sft", SMALL, [1], [4]).total / 3
    assert forward - attention == counted_by_torch(workload.policy_network(SMALL), ids)
    unused = 3 * 2 * 8  # transformers reads the head at every token and takes the last
    forward = stage_flops("reward", SMALL, [1], [3]).total / 3
    assert forward - attention == counted_by_torch(workload.scalar_network(SMALL), ids) - unused


def test_bytes_that_generation_reads() -> None:
    # two steps for the longer response: 960 + 8*16 weights each. Cached: 2 (k, v) * 2 layers * 4
    # values per token; the first response sees 3 and 4 tokens, the second 5.
    assert generation_bytes(SMALL, [3, 5], [2, 1], 2) == 2 * (2 * (960 + 128) + 16 * (3 + 4 + 5))


# --- both sides do the same work


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks")
    workload.save_networks(TINY, path)
    return path


def test_both_sides_get_the_same_prompts() -> None:
    ours = list(build_loader(TINY, 2))
    peers = [workload.left_padded(rows) for rows in workload.prompts(TINY, 2)]
    for mine, theirs in zip(ours, peers, strict=True):
        assert mine.input_ids.equal(theirs)
        assert mine.attention_mask.equal(theirs != workload.PAD)
        assert mine.ptx is None


@pytest.mark.parametrize("mode", ["ragged", "full"])
def test_responses_end_with_the_probability_asked_for(mode: Any) -> None:
    work = Workload(mode=mode, layers=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = workload.policy_network(work)
        workload.bias_lm_head(model, work)
        ids = torch.randint(3, work.vocab, (8, 64))
    with torch.no_grad():
        special = [workload.PAD, workload.BOS, workload.EOS]
        ends = model(ids).logits.softmax(-1)[..., special].mean((0, 1))
    assert ends[:2].max() < 1e-12
    if mode == "ragged":
        assert ends[2] == pytest.approx(1 / 32, rel=0.1)
    else:
        assert ends[2] < 1e-12


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_our_side_runs_and_counts_its_work(folder: Path) -> None:
    job = Job(replace(TINY, mode="full"), str(folder), warmup=1, updates=1)
    laps = run(job)
    assert len(laps.records) == 2
    record = laps.records[1]
    assert record["prompts"] == [len(row) for row in workload.prompts(job.work, 2)[1]]
    assert record["responses"] == [TINY.response] * TINY.batch
    assert set(record["phases"]) == {"rollout", "score", "update", "other"}
    assert sum(record["phases"].values()) == pytest.approx(record["seconds"])
    assert min(record["phases"].values()) >= 0
    assert laps.memory_before_mib > 0


# --- from updates to figures, tables and the page that quotes them

CEILINGS: dict[str, Any] = {"device": "a processor", "bytes_per_second": 1e9, "peak_bf16": None}
CEILINGS |= {"flops_fp32": 1e6, "flops_fp32_onednn": 2e6, "flops_bf16": 2e6}


def run_of(side: str, *seconds: float, foreign: float = 0.0, memory: float = 100.0) -> Any:
    def update(value: float) -> dict[str, Any]:
        phases = {"rollout": value / 2, "update": value / 4, "other": value / 4}
        counts = {"prompt_tokens": 30, "response_tokens": 70}
        counts |= {"flops": {"rollout": 1e5, "score": 2e5, "update": 3e5}}
        return {
            "seconds": value,
            "cpu_seconds": 2 * value,
            "foreign_cores": foreign,
            "phases": phases,
            **counts,
        }

    kind = {"side": side, "case": "ragged", "precision": "fp32", "versions": {"torch": "2.13.0"}}
    memories = {"memory_before_mib": 50.0, "peak_memory_mib": memory}
    return {**kind, **memories, "updates": [*map(update, seconds)]}


def test_summary_takes_medians_over_quiet_updates() -> None:
    runs = [run_of("TRL", 2.0, 4.0), run_of("TRL", 100.0, foreign=1.0), run_of("TRL", 3.0)]
    row = report.summarize(runs, CEILINGS, quiet_cores=0.05)
    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (3.0, 2.0, 4.0)
    assert row["cpu_seconds"] == 6.0
    assert (row["updates"], row["updates_dropped"]) == (3, 1)
    assert row["phases"] == {"rollout": 1.5, "update": 0.75, "other": 0.75}
    assert row["useful_gflops"] == pytest.approx(6e5 / 3 / 1e9)
    assert row["ceiling_fraction"] == pytest.approx(0.2)
    assert row["real_tokens"] == 100
    bf16 = [run | {"precision": "bf16-mixed"} for run in runs]
    assert report.summarize(bf16, CEILINGS, 0.05)["ceiling_fraction"] == pytest.approx(0.1)


@pytest.mark.parametrize(("threads", "device"), [(1, "cpu"), (2, "cpu"), (1, "cuda")])
def test_seconds_are_of_the_cpu_with_one_thread(threads: int, device: str) -> None:
    job = Job(TINY, threads=threads, device=device)
    update = {"seconds": 2.0, "cpu_seconds": 1.5, "foreign_cores": 0.0, "phases": {"update": 2.0}}
    run = {"updates": [update | {"prompts": [3], "responses": [4]}]}
    [labelled] = report.label_run(run, ("ragged", "fp32", "TRL"), job)["updates"]
    on_cpu = threads == 1 and device == "cpu"
    assert labelled["seconds"] == (1.5 if on_cpu else 2.0)
    assert labelled["phases"] == ({} if on_cpu else {"update": 2.0})


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_supervised_batches_hold_the_tokens_that_the_peer_gets(stage: Any) -> None:
    job = Job(TINY, stage=stage, warmup=0, updates=2)
    n_responses = 1 if stage == "sft" else 2
    questions, answers = workload.prompts(TINY, 2), workload.completions(TINY, 2, n_responses)
    for batch, rows, responses in zip(build_batches(job), questions, answers, strict=True):
        expected_prompts = [len(row) for row in rows] * n_responses
        expected = [len(r[side]) for side in range(n_responses) for r in responses]
        assert lengths(batch) == (expected_prompts, expected)
        first = batch if stage == "sft" else batch.chosen
        together = torch.cat([rows[0], responses[0][0]])
        assert first.input_ids[0, : len(together)].equal(together)


def test_page_and_tables_agree_with_the_results() -> None:
    page = report.PAGE.read_text("utf-8")
    assert "| PPO, full | fp32 |" in page
    assert report.fill_page(page, report.RESULTS) == page, "run python -m benchmarks.speed.report"
    for file in report.RESULTS.rglob("*.md"):
        if (file.with_suffix(".json")).is_file():
            result = json.loads(file.with_suffix(".json").read_text("utf-8"))
            tables = report.scaling_tables if "sweeps" in result else report.comparison_tables
            assert file.read_text("utf-8") == tables(result)


def test_readme_has_the_range_of_ppos_speed_ups() -> None:
    speeds = [
        ratio["speed"]
        for processor in report.MACHINES
        for file in (report.RESULTS / processor).glob("ppo_iteration*.json")
        for ratio in json.loads(file.read_text("utf-8"))["ratios"]
        if (ratio["side"], ratio["other"]) == (report.OURS, report.PEER)
        and ratio["precision"] == ratio["other_precision"]
    ]
    readme = (report.PAGE.parents[1] / "README.md").read_text("utf-8")
    expected = f"[{min(speeds):.1f} to {max(speeds):.1f} times as fast](docs/speed.md)"
    assert expected in readme
