"""SampleTimeline: when it samples, what it writes, and that training is unaffected."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lit_callbacks.sample_timeline import SampleTimeline
from tests.support.report_pages import read_events, read_texts
from tests.support.scripted import Saver, resumes_at_the_next_batch, trainer

BATCHES_PER_EPOCH = 5
SYSTEM = '[{"role": "system", "content": "a"}]'  # a dialogue without a question


class Answering(LightningModule):
    """Dropout and batch norm, so that random state and training modes matter."""

    def __init__(self, own_step: bool = False, records: Any = None) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)
        )
        self.frozen = torch.nn.Dropout(0.5).eval()
        self.own_step, self.records = own_step, records
        self.asked: list[list[str]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.own_step:
            self.log("step", float(self.trainer.fit_loop.total_batch_idx + 1) * 100)
        noise = random.random() + np.random.rand()  # noqa: NPY002 - the global state is the point
        loss: Tensor = (self.frozen(self.layers(batch)) + noise).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def sample(self, prompts: list[str]) -> list[dict[str, Any]]:
        assert not any(part.training for part in self.modules())
        assert not torch.is_grad_enabled()
        self.asked.append(prompts)
        score = float(torch.rand(())) + random.random() + np.random.rand()  # noqa: NPY002
        if self.records is not None:
            return self.records  # type: ignore[no-any-return]
        rest = {"score": score, "length": 3, "cut": False}
        return [{"response": f"{prompt}!", **rest} for prompt in prompts]

    answers = sample

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> DataLoader[Tensor]:
    rows = torch.arange(4.0 * BATCHES_PER_EPOCH).reshape(2 * BATCHES_PER_EPOCH, 2) / 10
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def fit_answering(folder: Path, module: Answering, *callbacks: Any, **arguments: Any) -> Answering:
    ckpt_path = arguments.pop("ckpt_path", None)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    run = trainer(folder, *callbacks, **{"max_epochs": 2, "log_every_n_steps": 50, **arguments})
    run.fit(module, batches(), batches(), ckpt_path=ckpt_path)
    return module


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in lines(path)]


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
def test_training_does_not_notice(tmp_path: Path) -> None:
    states = []
    for callbacks in ([], [SampleTimeline(["hi"], every_n_batches=1)]):
        torch.manual_seed(0)
        module = fit_answering(tmp_path, Answering(), *callbacks)
        states.append({k: v.clone() for k, v in module.state_dict().items()})
        draws = (float(torch.rand(())), random.random(), np.random.rand())  # noqa: NPY002
        states[-1]["draws"] = torch.tensor(draws, dtype=torch.float64)
        assert module.layers.training  # type: ignore[union-attr]
        assert not module.frozen.training  # type: ignore[union-attr]
    plain, watched = states
    assert [k for k in plain if not torch.equal(plain[k], watched[k])] == []


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
class TestFit:
    def test_it_samples_where_a_detector_changes_its_level(self, tmp_path: Path) -> None:
        def judge(trainer: Any, module: Any, *_: Any) -> None:
            module.log("monitor/level", float(trainer.global_step in (3, 4)))

        judging = LambdaCallback(on_train_batch_end=judge)
        fit_answering(tmp_path, Answering(), judging, SampleTimeline(["hi"], every_n_batches=8))
        assert steps(tmp_path / "samples.jsonl") == [0, 3, 5, 8, 10]

    def test_it_samples_first_each_n_batches_and_last(self, tmp_path: Path) -> None:
        module = Answering()
        fit_answering(tmp_path, module, SampleTimeline(["hi", "why"], every_n_batches=4))
        path = tmp_path / "samples.jsonl"
        assert steps(path) == [0, 0, 4, 4, 8, 8, 10, 10]
        assert module.asked == [["hi", "why"]] * 4
        last = lines(path)[-1]
        assert last.pop("score") > 0
        sample = {"response": "why!", "length": 3, "cut": False}
        assert last == {"step": 10, "prompt_index": 1, "prompt": "why", **sample}

    @pytest.mark.parametrize(
        ("interval", "accumulated", "sampled"), [(5, 1, [0, 5, 10]), (1, 5, [0, 1, 2])]
    )
    def test_each_optimizer_step_is_sampled_once(
        self, tmp_path: Path, interval: int, accumulated: int, sampled: list[int]
    ) -> None:
        timeline = SampleTimeline(["hi"], every_n_batches=interval)
        fit_answering(tmp_path, Answering(), timeline, accumulate_grad_batches=accumulated)
        assert steps(tmp_path / "samples.jsonl") == sampled

    def test_the_sanity_check_is_not_sampled(self, tmp_path: Path) -> None:
        module = Answering()
        fit_answering(tmp_path, module, SampleTimeline(["hi"], 100), num_sanity_val_steps=2)
        assert len(module.asked) == 2

    def test_the_modules_own_step_and_another_method(self, tmp_path: Path) -> None:
        timeline = SampleTimeline(["hi"], 5, "answers", str(tmp_path / "new" / "mine.jsonl"))
        fit_answering(tmp_path, Answering(own_step=True), timeline)
        assert steps(tmp_path / "new" / "mine.jsonl") == [0, 500, 1000]

    def test_tensorboard_gets_a_table_per_prompt_and_step(self, tmp_path: Path) -> None:
        records = [{"response": "a|b\n*c*", "score": 0.12345, "cut": True, "n": 2}] * 2
        logger = TensorBoardLogger(tmp_path, name="", version="")
        timeline = SampleTimeline(["<hi>", "why"], every_n_batches=5)
        fit_answering(
            tmp_path, Answering(records=records), timeline, logger=logger, log_every_n_steps=1
        )
        rest = ["|---|---|", r"| response | a\|b<br>\*c\* |"]
        rest += ["| score | 0.123 |", "| cut | yes |", "| n | 2 |"]
        for index, shown in enumerate(["&lt;hi&gt;", "why"]):
            texts = read_texts(tmp_path, f"samples/{index}")
            assert [step for step, _ in texts] == [0, 5, 10]
            assert texts[0][1].split("\n") == [f"| prompt | {shown} |", *rest]
        assert steps(tmp_path / "samples.jsonl") == [0, 0, 5, 5, 10, 10]

    @resumes_at_the_next_batch
    @pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
    @pytest.mark.parametrize(("saved_at", "sampled"), [(5, 3), (6, 2), (7, 2)])
    def test_resumed_timeline_is_whole(self, saved_at: int, sampled: int, tmp_path: Path) -> None:
        def timeline(name: str) -> SampleTimeline:
            return SampleTimeline(["hi", "why"], 2, file=str(tmp_path / name))

        fit_answering(
            tmp_path,
            Answering(own_step=True),
            timeline("whole.jsonl"),
            Saver(tmp_path),
            enable_checkpointing=True,
        )
        whole = lines(tmp_path / "whole.jsonl")
        assert [line["step"] for line in whole[::2]] == [0, 200, 400, 600, 800, 1000]
        # Cut off while it wrote: lines behind the checkpoint, the last of them without an end.
        cut = [*whole, {**whole[-1], "step": 1200, "response": "\u2028"}]
        text = "\n".join(json.dumps(line, ensure_ascii=False) for line in cut)
        (tmp_path / "cut.jsonl").write_text(text, "utf-8")
        resumed = Answering(own_step=True)
        fit_answering(
            tmp_path, resumed, timeline("cut.jsonl"), ckpt_path=tmp_path / f"{saved_at}.ckpt"
        )
        assert len(resumed.asked) == sampled
        after = lines(tmp_path / "cut.jsonl")
        n_kept = 2 * (6 - sampled)
        assert after[:n_kept] == whole[:n_kept]
        places = [[(row["step"], row["prompt_index"]) for row in rows] for rows in (after, whole)]
        assert places[0] == places[1]
        assert not (tmp_path / "cut.jsonl.new").exists()

    @resumes_at_the_next_batch
    def test_resumed_timeline_samples_the_change_of_a_level(self, tmp_path: Path) -> None:
        """The level changes at the first batch after the checkpoint."""

        def judge(trainer: Any, module: Any, *_: Any) -> None:
            module.log("monitor/level", float(trainer.global_step >= 6))

        def callbacks() -> list[Any]:
            judging = LambdaCallback(on_train_batch_end=judge)
            return [judging, SampleTimeline(["hi"], every_n_batches=8), Saver(tmp_path)]

        fit_answering(tmp_path, Answering(), *callbacks(), enable_checkpointing=True)
        assert steps(tmp_path / "samples.jsonl") == [0, 6, 8, 10]
        fit_answering(
            tmp_path,
            Answering(),
            *callbacks(),
            enable_checkpointing=True,
            ckpt_path=tmp_path / "5.ckpt",
        )
        assert steps(tmp_path / "samples.jsonl") == [0, 6, 8, 10]

    @resumes_at_the_next_batch
    def test_a_checkpoint_without_a_timeline_drops_nothing(self, tmp_path: Path) -> None:
        fit_answering(tmp_path, Answering(), Saver(tmp_path), enable_checkpointing=True)
        (tmp_path / "samples.jsonl").write_text('{"step": 99}\n')
        timeline = SampleTimeline(["hi"], 4)
        fit_answering(tmp_path, Answering(), timeline, ckpt_path=tmp_path / "5.ckpt")
        assert steps(tmp_path / "samples.jsonl") == [99, 8, 10]

    def test_a_new_fit_starts_the_file_anew(self, tmp_path: Path) -> None:
        timeline = SampleTimeline(["hi"], every_n_batches=10)
        for _ in range(2):
            fit_answering(tmp_path, Answering(), timeline)
        assert steps(tmp_path / "samples.jsonl") == [0, 10]

    def test_a_file_that_is_no_timeline_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        content = '{"step": 0, "prompt": "hi"}\n{"prompt": "hi"}\n'
        path.write_text(content)
        timeline = SampleTimeline(str(path), file=str(path))
        with pytest.raises(ValueError, match=r"prompts\.jsonl:2: expected a line of a timeline"):
            fit_answering(tmp_path, Answering(), timeline)
        assert path.read_text() == content

    def test_rank_1_writes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SingleDeviceStrategy, "is_global_zero", property(lambda self: False))
        module = Answering()
        logger = TensorBoardLogger(tmp_path, name="", version="")
        fit_answering(
            tmp_path, module, SampleTimeline(["hi"], 5), logger=logger, log_every_n_steps=1
        )
        assert len(module.asked) == 3
        assert not (tmp_path / "samples.jsonl").exists()
        assert read_events(tmp_path).Tags()["tensors"] == []

    def test_a_fast_dev_run_samples_and_writes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "samples.jsonl").write_text("precious\n")
        timeline = SampleTimeline(["hi"], file=str(tmp_path / "samples.jsonl"))
        module = Answering()
        fit_answering(tmp_path, module, timeline, fast_dev_run=True)
        assert len(module.asked) == 2
        assert (tmp_path / "samples.jsonl").read_text() == "precious\n"

    @pytest.mark.parametrize(
        ("records", "message"),
        [
            ([], "Answering.sample: expected a list of 1 records, got 0 records"),
            ("hi", "expected a list of 1 records, got 'hi'"),
            ([{"text": "hi"}], "expected a dict with the text 'response' as record 0"),
            ([{"response": 3}], "expected a dict with the text 'response' as record 0"),
            ([{"response": "a", "step": 3}], "under other keys than step.*got {'step': 3"),
            ([{"response": "a", "x": None}], "expected a str, float, int or bool.*'x': None"),
            ([{"response": "a", "x": torch.ones(1)}], "expected a str, float, int or bool.*'x'"),
        ],
    )
    def test_method_that_breaks_the_contract_is_named(
        self, records: Any, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=message):
            fit_answering(tmp_path, Answering(records=records), SampleTimeline(["hi"]))

    def test_missing_method_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="method: expected Answering to have a method 'talk'"):
            fit_answering(tmp_path, Answering(), SampleTimeline(["hi"], method="talk"))


def test_prompts_are_read_from_files(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\n two \nthree\n")
    assert SampleTimeline(str(text)).prompts == ["one", "two", "three"]
    assert SampleTimeline(str(text), n_prompts=2).prompts == ["one", "two"]
    assert SampleTimeline(["a", "b", "c"], n_prompts=1).prompts == ["a", "b", "c"]
    turns = (("user", "hi"), ("assistant", "yes?"), ("user", "why"))
    chat = [{"role": role, "content": content} for role, content in turns]
    rows = [{"prompt": "one"}, {"prompt": chat[:1]}, {"prompt": chat}]
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text("\n\n".join(map(json.dumps, rows)) + "\nbroken")
    dialogue = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: why"
    assert SampleTimeline(str(jsonl), n_prompts=3).prompts == ["one", "hi", dialogue]
    with pytest.raises(ValueError, match=r"prompts: .*prompts\.jsonl:6: expected an object"):
        SampleTimeline(str(jsonl))
    text.write_text("\n \n")
    with pytest.raises(ValueError, match=r"expected at least one, got none in .*prompts\.txt"):
        SampleTimeline(str(text))


@pytest.mark.parametrize(
    "prompt",
    ["3", "{}", *(f'{{"prompt": {value}}}' for value in ("3", '" "', "[]", '["a"]', SYSTEM))],
)
def test_a_line_without_a_prompt_is_named(prompt: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{prompt}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: expected an object whose field"):
        SampleTimeline(str(path))
