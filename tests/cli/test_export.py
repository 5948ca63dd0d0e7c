"""`lit_rlhf export`: what comes out is what the finished stage leaves."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lit_rlhf.cli.export import main
from lit_rlhf.data import TextContract
from lit_rlhf.forward import sequence_scores
from lit_rlhf.models import load_causal_lm, load_scalar_model, load_tokenizer, save_model_folder
from tests.cli.exported import Runs, assert_same_model, refused, weights
from tests.models.foreign import FOREIGN, write_foreign
from tests.modules.saved_runs import as_engines_write_it, saved_run
from tests.modules.stages import write_data, write_models
from tests.support.tiny_models import tiny_causal_lm, tiny_config, tiny_tokenizer

IDS = torch.arange(4, 40).reshape(3, 12)


PLACES = [
    ("sft", None, "."),
    ("reward", None, "."),
    ("ppo", None, "."),
    ("ppo", "critic", "critic"),
]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("stage", "network", "place"), PLACES)
def test_a_checkpoint_becomes_what_the_stage_leaves(
    stage: str, network: str | None, place: str, lora: bool, runs: Runs, tmp_path: Path
) -> None:
    saved = runs(stage, lora)
    more = [] if network is None else ["--network", network]
    main(["--checkpoint", str(saved.checkpoint), "--output", str(tmp_path / "m"), *more])
    assert_same_model(tmp_path / "m", saved.finished / place)
    card = (tmp_path / "m" / "README.md").read_text("utf-8")
    assert f"lit_rlhf export --checkpoint {saved.checkpoint}" in card
    assert "| `global_step` |" in card
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("lora", [False, True])
def test_engines_checkpoints_of_any_number_of_ranks(
    ranks: int, lora: bool, runs: Runs, tmp_path: Path
) -> None:
    saved = runs("ppo", lora)
    path = as_engines_write_it(saved, tmp_path / "step=1.ckpt", ranks)
    for network, place in (("policy", "."), ("critic", "critic")):
        output = tmp_path / network
        main(["--checkpoint", str(path), "--output", str(output), "--network", network])
        assert_same_model(output, saved.finished / place)


def test_engines_checkpoints_of_a_reward_model(runs: Runs, tmp_path: Path) -> None:
    saved = runs("reward")
    path = as_engines_write_it(saved, tmp_path / "step=1.ckpt", 2)
    main(["--checkpoint", str(path), "--output", str(tmp_path / "m")])
    assert_same_model(tmp_path / "m", saved.finished)


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    root = write_data(write_models(tmp_path / "root", tiny_config("qwen3")))
    saved = saved_run("ppo", root, tmp_path / "run")
    engines = as_engines_write_it(saved, tmp_path / "step=1.ckpt", 2)
    for number, path in enumerate((saved.checkpoint, engines)):
        output = tmp_path / str(number)
        main(["--checkpoint", str(path), "--output", str(output)])
        assert_same_model(output, saved.finished)
        assert "lm_head.weight" not in weights(output)


def test_weights_are_cast_and_sharded(runs: Runs, tmp_path: Path) -> None:
    saved = runs("ppo", True)
    more = ["--dtype", "bfloat16", "--max_shard_size", "8KB"]
    main(["--checkpoint", str(saved.checkpoint), "--output", str(tmp_path / "m"), *more])
    assert len(list((tmp_path / "m").glob("model-*-of-*.safetensors"))) > 2
    full = weights(saved.finished)
    for name, tensor in weights(tmp_path / "m").items():
        # merged in float32 and rounded once
        assert torch.equal(tensor, full[name].to(torch.bfloat16)), name
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert plain.dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["openrlhf", "trl"])
def test_a_reward_model_in_other_formats_scores_alike(
    form: str, runs: Runs, tmp_path: Path
) -> None:
    saved = runs("reward")
    more = ["--format", form]
    main(["--checkpoint", str(saved.checkpoint), "--output", str(tmp_path / "m"), *more])
    mask = torch.ones_like(IDS, dtype=torch.bool)
    with torch.no_grad():
        actual, expected = (
            sequence_scores(load_scalar_model(folder).eval(), IDS, mask)
            for folder in (tmp_path / "m", saved.finished)
        )
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_value_head_keeps_the_output_layer_that_was_trained(runs: Runs, tmp_path: Path) -> None:
    saved = runs("reward")
    more = ["--format", "trl", "--dtype", "bfloat16"]
    main(["--checkpoint", str(saved.checkpoint), "--output", str(tmp_path / "m"), *more])
    trained = saved.module.get_parameter("networks.lm_head.weight")
    assert torch.equal(weights(tmp_path / "m")["lm_head.weight"], trained.bfloat16())


@pytest.mark.parametrize(("stage", "network"), [("ppo", "policy"), ("ppo", "critic")])
def test_adapters_may_stay_by_themselves_and_be_merged_later(
    stage: str, network: str, runs: Runs, tmp_path: Path
) -> None:
    saved = runs(stage, True)
    adapters, merged = tmp_path / "adapters", tmp_path / "merged"
    more = ["--merge_lora", "false", "--network", network]
    main(["--checkpoint", str(saved.checkpoint), "--output", str(adapters), *more])
    assert (adapters / "adapter_config.json").is_file()
    assert not (adapters / "config.json").exists()
    main(["--checkpoint", str(adapters), "--output", str(merged)])
    expected = weights(saved.finished if network == "policy" else saved.finished / "critic")
    actual = weights(merged)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6)
    assert TextContract.load(merged) == TextContract.load(saved.finished)


def test_full_weights_are_no_adapters(runs: Runs, tmp_path: Path) -> None:
    saved = runs("sft")
    said = refused(
        *("--checkpoint", str(saved.checkpoint), "--output", str(tmp_path / "m")),
        *("--merge_lora", "false"),
    )
    assert "merge_lora: expected true" in said
    assert list(tmp_path.iterdir()) == []


def test_a_finished_folder_is_cast(runs: Runs, tmp_path: Path) -> None:
    saved = runs("ppo")
    more = ["--dtype", "float16"]
    main(["--checkpoint", str(saved.finished), "--output", str(tmp_path / "m"), *more])
    full, half = weights(saved.finished), weights(tmp_path / "m")
    assert {name: tensor.half() for name, tensor in full.items()}.keys() == half.keys()
    assert all(torch.equal(half[name], tensor.half()) for name, tensor in full.items())
    for name in ("README.md", "text_contract.json", "generation_config.json"):
        assert filecmp.cmp(tmp_path / "m" / name, saved.finished / name, shallow=False), name
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.chat_template == load_tokenizer(saved.finished).chat_template


def test_a_folder_keeps_its_type(tmp_path: Path) -> None:
    model: Any = tiny_causal_lm()
    model.to(torch.bfloat16)
    save_model_folder(model, tiny_tokenizer(), tmp_path / "a")
    main(["--checkpoint", str(tmp_path / "a"), "--output", str(tmp_path / "b")])
    assert {tensor.dtype for tensor in weights(tmp_path / "b").values()} == {torch.bfloat16}


@pytest.mark.parametrize("layout", ["paper", "trl", "openrlhf, older"])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_foreign_reward_model_becomes_ours(layout: str, pickled: bool, tmp_path: Path) -> None:
    written = write_foreign(tmp_path / "theirs", FOREIGN[layout], shards=2, pickled=pickled)
    form = "trl" if FOREIGN[layout].bias else "transformers"
    main(
        [
            *("--checkpoint", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")),
            *("--chat_template", "paper-en", "--format", form),
        ]
    )
    mask = torch.ones_like(IDS, dtype=torch.bool)
    with torch.no_grad():
        scores = sequence_scores(load_scalar_model(tmp_path / "ours").eval(), IDS, mask)
    torch.testing.assert_close(scores, written.scores(IDS), rtol=1e-6, atol=1e-6)
    contract = TextContract.load(tmp_path / "ours")
    assert contract.render(({"role": "user", "content": "a"},)) == "Human:a</s>"
    if form == "transformers":
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
        assert plain.config.num_labels == 1


@pytest.mark.parametrize("kind", ["reward", "policy"])
@pytest.mark.parametrize("pickled", [False, True])
def test_the_papers_differences_are_added_to_llama(
    kind: str, pickled: bool, tmp_path: Path
) -> None:
    """As their merge_weight_en.py: what has `layers` in its name is a difference."""
    layout = FOREIGN["paper"]._replace(config={"architectures": ["Llama"]})
    written = write_foreign(tmp_path / "tuned", FOREIGN["paper"] if kind == "reward" else layout)
    base = tiny_causal_lm(seed=9)
    save_model_folder(base, tiny_tokenizer(), tmp_path / "llama")
    whole, llama = weights(tmp_path / "tuned"), weights(tmp_path / "llama")
    if kind == "policy":
        del whole["reward_head.weight"]
    published = {n: t - llama[n] if "layers" in n else t for n, t in whole.items()}
    (tmp_path / "tuned" / "model.safetensors").unlink()
    if pickled:
        torch.save(published, tmp_path / "tuned" / "pytorch_model.bin")
    else:
        save_file(published, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    main(
        [
            *("--checkpoint", str(tmp_path / "tuned"), "--output", str(tmp_path / "whole")),
            *("--base", str(tmp_path / "llama")),
        ]
    )
    mask = torch.ones_like(IDS, dtype=torch.bool)
    with torch.no_grad():
        if kind == "reward":
            model = load_scalar_model(tmp_path / "whole").eval()
            actual, expected = sequence_scores(model, IDS, mask), written.scores(IDS)
        else:
            actual = load_causal_lm(tmp_path / "whole").eval()(input_ids=IDS).logits
            expected = written.causal(input_ids=IDS).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_another_models_layers_are_no_base(tmp_path: Path) -> None:
    write_foreign(tmp_path / "tuned", FOREIGN["paper"])
    save_model_folder(tiny_causal_lm("qwen3"), tiny_tokenizer(), tmp_path / "other")
    said = refused(
        *("--checkpoint", str(tmp_path / "tuned"), "--output", str(tmp_path / "m")),
        *("--base", str(tmp_path / "other")),
    )
    assert "base: expected the model that the layers are differences from" in said
