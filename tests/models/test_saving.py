import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig

from lit_rlhf.files import atomic_io
from lit_rlhf.files.atomic_io import replaced_path
from lit_rlhf.forward import stop_token_ids
from lit_rlhf.models import load_causal_lm, load_scalar_model, load_tokenizer, saving
from lit_rlhf.models.saving import merge_adapters, replace_folder, save_model_folder
from tests.support.full_disk import largest_file
from tests.support.tiny_models import BOS_ID, EOS_ID, PAD_ID, tiny_causal_lm, tiny_tokenizer

Folder = Callable[[str], Path]


CONTRACT = Mock(save=lambda folder: (folder / "text_contract.json").write_text("{}"))
BROKEN = Mock(save=Mock(side_effect=OSError("disk full")))


def save(folder: Path, seed: int = 0, **options: Any) -> None:
    save_model_folder(tiny_causal_lm(seed=seed), tiny_tokenizer(), folder, **options)


def weights_equal(folder: Path, seed: int) -> bool:
    loaded, made = load_causal_lm(folder).state_dict(), tiny_causal_lm(seed=seed).state_dict()
    return all(torch.equal(loaded[name], made[name]) for name in made)


def test_a_folder_holds_what_plain_transformers_loads(family: str, tmp_path: Path) -> None:
    model, tokenizer = tiny_causal_lm(family), tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    save_model_folder(model, tokenizer, tmp_path / "m", contract=CONTRACT)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {
        *("config.json", "generation_config.json", "lit_rlhf.json", "model.safetensors"),
        *("text_contract.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    ids = torch.arange(4, 14).unsqueeze(0)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    torch.testing.assert_close(plain(ids).logits, model(ids).logits)
    assert load_tokenizer(tmp_path / "m").chat_template == tokenizer.chat_template


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_save_keeps_the_old_model_and_leaves_no_trace(tmp_path: Path, lost: bool) -> None:
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "m", contract=BROKEN)
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "m")
    if lost:  # between the renames of an earlier save
        (tmp_path / "m").rename(replaced_path(tmp_path / "m"))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "m", seed=1, contract=BROKEN)
    assert weights_equal(tmp_path / "m", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_failed_rename_restores_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "m")
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("interrupted")
        return rename(path, target)

    # as on a file system that cannot swap two names
    monkeypatch.setattr(atomic_io, "try_swap_names", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="interrupted"):
        save(tmp_path / "m", seed=1)
    assert weights_equal(tmp_path / "m", 0)


def test_leftovers_of_a_crash_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".m.partial").mkdir()
    (tmp_path / ".m.partial" / "model.safetensors").write_text("half")
    save(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_model_may_hold_another(tmp_path: Path, causal_folder: Folder) -> None:
    policy = tiny_causal_lm()
    critic = load_scalar_model(causal_folder("llama"), head_seed=0)
    for _ in range(2):
        with replace_folder(tmp_path / "m") as partial:
            save_model_folder(policy, tiny_tokenizer(), partial)
            save_model_folder(critic, tiny_tokenizer(), partial / "critic")
    assert (tmp_path / "m" / "critic" / "config.json").is_file()
    assert weights_equal(tmp_path / "m", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_model_saved_inside_another_is_not_lost_with_it(tmp_path: Path) -> None:
    for folder in (tmp_path / "m", tmp_path / "m" / "other"):
        save(folder)
    with pytest.raises(ValueError, match=r"expected a model folder.*other/config\.json"):
        save(tmp_path / "m", seed=1)
    assert weights_equal(tmp_path / "m" / "other", 0)


def test_a_folder_is_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    synced: list[str] = []

    def record(path: Path) -> None:
        assert not (tmp_path / "m").exists() or path == tmp_path
        synced.append(path.name)

    with patch.object(saving, "fsync", record), replace_folder(tmp_path / "m") as partial:
        (partial / "critic").mkdir()
        (partial / "critic" / "model.safetensors").touch()
    assert sorted(synced) == [".m.partial", "critic", "lit_rlhf.json", "model.safetensors"]


def test_leftovers_of_an_interrupted_save_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / ".m.partial")
    for load in (load_causal_lm, load_scalar_model):
        with pytest.raises(ValueError, match=r"path: .*\.m\.partial, which an interrupted save"):
            load(tmp_path / ".m.partial")


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(
    "foreign", ["notes.docx", "notes.txt", "run.py", "data/train.csv", "checkpoints/last.ckpt"]
)
def test_folder_of_other_content_is_kept(foreign: str, saved: bool, tmp_path: Path) -> None:
    if saved:
        save(tmp_path / "m")
    (tmp_path / "m" / foreign).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / "m" / foreign).write_text("mine")
    with pytest.raises(ValueError, match="folder: expected a model folder or a free name"):
        save(tmp_path / "m")
    assert (tmp_path / "m" / foreign).read_text() == "mine"


def test_a_link_in_a_folder_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path / "m")
    (tmp_path / "m" / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"expected a model folder.*\(data\)"):
        save(tmp_path / "m")


@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_a_file_that_was_changed_since_is_not_replaced(name: str, tmp_path: Path) -> None:
    save(tmp_path / "m", card="# Card")
    with (tmp_path / "m" / name).open("r+b") as file:
        file.write(b"## Mine")
    with pytest.raises(ValueError, match=rf"expected a model folder.*changed since \({name}\)"):
        save(tmp_path / "m")
    assert (tmp_path / "m" / name).read_bytes()[:7] == b"## Mine"


@pytest.mark.parametrize("name", ["m", "a/b"])
def test_an_empty_folder_and_one_without_parents_are_free_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save(tmp_path / name)
    assert weights_equal(tmp_path / name, 0)


def saved_generation(folder: Path) -> dict[str, object]:
    settings = json.loads((folder / "generation_config.json").read_text())
    del settings["transformers_version"]
    return settings


def test_generation_settings_of_the_base_model_are_not_passed_on(tmp_path: Path) -> None:
    model = tiny_causal_lm()
    model.generation_config = GenerationConfig(top_k=7, temperature=0.3, do_sample=True)
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m")
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    assert (saved_generation(tmp_path / "m"), model.generation_config.top_k) == (ids, 7)


def test_saved_model_stops_where_the_trained_one_does(tmp_path: Path) -> None:
    model = tiny_causal_lm()
    model.generation_config = GenerationConfig(eos_token_id=[5, EOS_ID, 1])  # type: ignore[no-untyped-call]
    for folder in ("first", "second"):  # the second from what the first has saved
        save_model_folder(model, tiny_tokenizer(), tmp_path / folder)
        assert saved_generation(tmp_path / folder)["eos_token_id"] == [EOS_ID, 1, 5]
        saved = load_causal_lm(tmp_path / folder)
        assert stop_token_ids(saved) == stop_token_ids(model, tiny_tokenizer())
        model = saved


def test_generation_settings_are_saved(tmp_path: Path, scalar_folder: Folder) -> None:
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 9}
    save(tmp_path / "m", generation=settings)
    assert saved_generation(tmp_path / "m").items() >= settings.items()
    # greedy settings drop what only sampling uses
    save(tmp_path / "greedy", generation=settings | {"do_sample": False})
    assert not saved_generation(tmp_path / "greedy").keys() & {"temperature", "top_k"}
    with pytest.raises(ValueError, match=r"generation: .*temprature"):
        save(tmp_path / "m", generation={"temprature": 1.0})
    scalar = load_scalar_model(scalar_folder("llama"))
    with pytest.raises(ValueError, match="generation: expected None"):
        save_model_folder(scalar, tiny_tokenizer(), tmp_path / "m", generation=settings)


def test_saving_leaves_the_tokenizer_as_it_was(tmp_path: Path, scalar_folder: Folder) -> None:
    tokenizer = tiny_tokenizer()
    save_model_folder(load_scalar_model(scalar_folder("llama")), tokenizer, tmp_path / "m")
    assert tokenizer.padding_side == "left"
    assert load_tokenizer(tmp_path / "m").padding_side == "left"


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    save(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    save(tmp_path / "link", seed=1)
    assert (tmp_path / "link").is_symlink()
    assert weights_equal(tmp_path / "real", 1)
    shutil.rmtree(tmp_path / "real")


@pytest.mark.parametrize("room", [100, 3000])
def test_a_full_disk_is_named_with_the_folder(tmp_path: Path, room: int) -> None:
    message = f"{tmp_path}/m.*File too large|File too.*{tmp_path}/m"
    with largest_file(room), pytest.raises(OSError, match=message):
        save(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def adapted_causal_lm(family: str, targets: list[str], **options: Any) -> Any:
    """A tiny model in LoRA adapters, all of whose numbers have moved."""
    config = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = get_peft_model(tiny_causal_lm(family), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


# peft (0.21) looks at what transformers 5.17 deprecates
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "targets", "options"),
    [
        ("llama", ["q_proj", "down_proj"], {"use_dora": True}),
        ("gpt2", ["c_attn", "c_proj"], {"use_dora": True, "fan_in_fan_out": True}),
        ("gpt2", ["c_attn", "c_proj"], {"lora_bias": True, "fan_in_fan_out": True}),
        ("llama", ["q_proj"], {"use_rslora": True}),
    ],
)
@torch.no_grad()
def test_saved_model_computes_what_the_adapted_one_does(
    family: str, targets: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    model = adapted_causal_lm(family, targets, **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(4, 14).unsqueeze(0)
    save_model_folder(model, tiny_tokenizer(), tmp_path / "m")
    merged = load_causal_lm(tmp_path / "m").eval()
    with model.disable_adapter():
        assert not torch.allclose(model(ids).logits, merged(ids).logits, atol=1e-2)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but")
def test_bias_of_an_adapter_needs_a_bias_below_it() -> None:
    model = adapted_causal_lm("llama", ["q_proj"], lora_bias=True)
    with pytest.raises(ValueError, match="expected lora_bias on layers with a bias only"):
        merge_adapters(model)
