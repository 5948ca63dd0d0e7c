"""`lit_rlhf export`: its flags, what it prints, when it refuses, and uploads to the hub.

What it writes is tested in `tests/export`.
"""

import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from huggingface_hub import HfApi, RepoUrl
from safetensors.torch import load_file, save_file

from lit_rlhf.cli.export import COMMAND
from lit_rlhf.cli.show import describe
from lit_rlhf.data import TextContract
from lit_rlhf.files import hash_model
from lit_rlhf.models import save_model_folder
from tests.support.exported_runs import Runs, assert_same_model, weights
from tests.support.foreign_models import FOREIGN, write_foreign
from tests.support.stages import content
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

main = partial(COMMAND.run, prog="lit_rlhf export")


def export_error(*arguments: str) -> str:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    return str(error.value.code)


def test_export_writes_the_network_asked_for_and_its_card(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = runs("ppo")
    more = ["--network", "critic"]
    (tmp_path / "m").mkdir()
    main(["--checkpoint", str(saved.checkpoint), "--output", str(tmp_path / "m"), *more])
    assert_same_model(tmp_path / "m", saved.finished / "critic")
    card = (tmp_path / "m" / "README.md").read_text("utf-8")
    assert f"lit_rlhf export --checkpoint {saved.checkpoint.name}" in card
    assert str(saved.checkpoint.parent) not in card
    assert "MB of weights in 1 file" in capsys.readouterr().out


def test_flags_choose_type_shards_adapters_and_base(runs: Runs, tmp_path: Path) -> None:
    saved = runs("ppo", True)
    source = ["--checkpoint", str(saved.checkpoint)]
    small = ["--dtype", "bfloat16", "--max_shard_size", "8KB"]
    main([*source, "--output", str(tmp_path / "small"), *small])
    assert len(list((tmp_path / "small").glob("model-*-of-*.safetensors"))) > 2
    assert {tensor.dtype for tensor in weights(tmp_path / "small").values()} == {torch.bfloat16}
    adapters = tmp_path / "adapters"
    main([*source, "--output", str(adapters), "--merge_lora", "false"])
    assert (adapters / "adapter_config.json").is_file()
    more = ["--output", str(tmp_path / "n"), "--merge_lora", "false", "--format", "trl"]
    assert "format: expected transformers for adapters" in export_error(*source, *more)
    save_model_folder(tiny_causal_lm("qwen3"), tiny_tokenizer(), tmp_path / "other")
    other = ["--output", str(tmp_path / "n"), "--base", str(tmp_path / "other")]
    assert "path: expected a model of the weights' shape" in export_error(*source, *other)
    for size in ("0", "0GB", "5", "large"):
        sized = ["--output", str(tmp_path / "n"), "--max_shard_size", size]
        assert "max_shard_size: expected a size such as 5GB" in export_error(*source, *sized)
    assert not (tmp_path / "n").exists()


def test_foreign_model_gets_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_foreign(tmp_path / "theirs", FOREIGN["trl"])
    source = ["--checkpoint", str(tmp_path / "theirs"), "--format", "trl"]
    main([*source, "--output", str(tmp_path / "a")])
    assert "Name it with --chat_template" in capsys.readouterr().out
    main([*source, "--output", str(tmp_path / "b"), "--chat_template", "paper-en"])
    assert "--chat_template" not in capsys.readouterr().out
    contract = TextContract.load(tmp_path / "b")
    assert contract.render(({"role": "user", "content": "a"},)) == "Human:a</s>"


def test_a_file_that_is_neither_checkpoint_nor_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    output = ["--output", str(tmp_path / "m")]
    assert "does not exist" in export_error("--checkpoint", str(tmp_path / "missing"), *output)
    assert "state.ckpt" in export_error("--checkpoint", str(tmp_path / "empty"), *output)
    # a closing tag of rich's markup, without an opening one
    assert "does not exist" in export_error("--checkpoint", str(tmp_path / "[/bold]"), *output)


def test_taken_name_is_refused_unless_overwriting_is_asked_for(
    runs: Runs, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "policy", tmp_path / "m")
    arguments = ["--checkpoint", str(runs("sft").checkpoint), "--output", str(tmp_path / "m")]
    assert "--overwrite replaces a model" in export_error(*arguments)
    assert_same_model(tmp_path / "m", root / "policy")
    main([*arguments, "--overwrite", "true"])
    assert_same_model(tmp_path / "m", runs("sft").finished)
    (tmp_path / "m" / "thesis.docx").write_text("mine")
    unread = tmp_path / "unread"
    unread.touch()
    arguments[1] = str(unread)
    assert "thesis.docx" in export_error(*arguments, "--overwrite", "true")


def test_output_that_is_an_input_is_refused(root: Path, tmp_path: Path) -> None:
    model = shutil.copytree(root / "policy", tmp_path / "outer" / "m")
    shutil.copytree(model, tmp_path / "other")
    (tmp_path / "link").symlink_to(model)
    before = content(tmp_path)
    for source, average, output in (
        (model, [], model),
        (model, [], tmp_path / "link"),
        (model, [], tmp_path / "outer"),
        (tmp_path / "other", [model], model),
    ):
        words = ["--checkpoint", str(source), "--output", str(output), "--overwrite", "true"]
        words += ["--average", json.dumps([str(path) for path in average])] if average else []
        assert "which is or contains" in export_error(*words)
        assert content(tmp_path) == before


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What the hub is asked for."""
    hub = Mock()
    hub.create_repo.return_value = RepoUrl("https://huggingface.co/someone/model")
    monkeypatch.setattr(HfApi, "create_repo", hub.create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", hub.upload_folder)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return hub


def uploading(runs: Runs, output: Path, *more: str) -> list[str]:
    return ["--checkpoint", str(runs("sft").checkpoint), "--output", str(output), *more]


def test_nothing_is_uploaded_by_default(runs: Runs, tmp_path: Path, hub: Mock) -> None:
    main(uploading(runs, tmp_path / "m"))
    assert hub.mock_calls == []


@pytest.mark.parametrize("private", [True, False])
def test_folder_is_uploaded_if_asked(
    private: bool, runs: Runs, tmp_path: Path, hub: Mock, capsys: Any
) -> None:
    more = [] if private else ["--private", "false"]
    main(uploading(runs, tmp_path / "m", "--push_to_hub", "someone/model", *more))
    hub.create_repo.assert_called_once_with("someone/model", private=private, exist_ok=True)
    uploaded = hub.upload_folder.call_args.kwargs
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("someone/model", str(tmp_path / "m"))
    printed = capsys.readouterr()
    assert "Uploaded: https://huggingface.co/someone/model" in printed.out
    assert "hf_secret" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("token", "name", "message"),
    [(None, "someone/model", "`hf auth login`, or set HF_TOKEN"), ("hf", "a/b/c", "a/b/c")],
)
def test_bad_upload_is_refused_before_anything_is_written(
    runs: Runs, tmp_path: Path, hub: Mock, token: Any, name: str, message: str
) -> None:
    with patch("huggingface_hub.get_token", return_value=token):
        assert message in export_error(*uploading(runs, tmp_path / "m", "--push_to_hub", name))
    assert hub.mock_calls == list(tmp_path.iterdir()) == []


def test_failed_upload_keeps_the_folder_and_says_how_to_go_on(
    runs: Runs, tmp_path: Path, hub: Mock
) -> None:
    hub.upload_folder.side_effect = ConnectionError("cut off")
    message = export_error(*uploading(runs, tmp_path / "m", "--push_to_hub", "someone/model"))
    assert "uploading to someone/model failed: cut off" in message
    assert "hf upload someone/model" in message
    assert_same_model(tmp_path / "m", runs("sft").finished)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_weights_are_averaged(stage: str, runs: Runs, tmp_path: Path) -> None:
    saved, tensors = runs(stage), []
    for place, name in enumerate(("one", "two", "three")):
        shutil.copytree(saved.finished, tmp_path / name)
        (tmp_path / name / "lit_rlhf.json").unlink()  # which lists the weights as they were
        for file in sorted((tmp_path / name).glob("*.safetensors")):
            generator = torch.Generator().manual_seed(place)
            changed = {
                key: tensor + torch.randn(tensor.shape, generator=generator)
                for key, tensor in load_file(file).items()
            }
            save_file(changed, file, metadata={"format": "pt"})
        tensors.append(weights(tmp_path / name))
    # it may have seen shorter texts
    contract = replace(TextContract.load(saved.finished), max_length=7)
    (tmp_path / "two" / "text_contract.json").write_text(json.dumps(asdict(contract)))
    output, others = tmp_path / "averaged", f"[{tmp_path / 'two'}, {tmp_path / 'three'}]"
    main(["--checkpoint", str(tmp_path / "one"), "--average", others, "--output", str(output)])
    averages = weights(output)
    assert averages.keys() == tensors[0].keys()
    for key, tensor in averages.items():
        expected = sum(each[key].double() for each in tensors) / 3
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
    parts = [f"{name} {hash_model(tmp_path / name)}" for name in ("one", "two", "three")]
    assert describe(output)["average_of"] == parts
    assert f"- {parts[2]}\n" in (output / "README.md").read_text("utf-8")
    assert TextContract.load(output) == TextContract.load(saved.finished)


def test_other_models_are_not_averaged(runs: Runs, tmp_path: Path) -> None:
    save_model_folder(tiny_causal_lm("qwen3"), tiny_tokenizer(), tmp_path / "other")
    source = ["--checkpoint", str(runs("sft").finished), "--output", str(tmp_path / "m")]
    message = export_error(*source, "--average", f"[{tmp_path / 'other'}]")
    assert f"fine-tunings of one model, got the language model in {tmp_path / 'other'}" in message
    assert f"beside the language model in {runs('sft').finished}" in message
    assert "their architectures differ" in message
    # weights of the same shapes that positions enter in another way, and of another template
    finished = runs("sft").finished
    for name, file, key, value in (
        ("rope", "config.json", "rope_parameters", {"rope_theta": 7.0, "rope_type": "default"}),
        ("text", "text_contract.json", "add_bos", True),
    ):
        shutil.copytree(finished, tmp_path / name)
        settings = json.loads((finished / file).read_text("utf-8"))
        assert settings[key] != value
        (tmp_path / name / file).write_text(json.dumps(settings | {key: value}), "utf-8")
        (tmp_path / name / "lit_rlhf.json").unlink()  # which lists the file
    assert "architectures differ" in export_error(*source, "--average", f"[{tmp_path / 'rope'}]")
    assert "add_bos is False here and True" in export_error(
        *source, "--average", f"[{tmp_path / 'text'}]"
    )
    assert not (tmp_path / "m").exists()
