from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lit_rlhf.forward import hidden_states, logits_from_hidden, token_logits
from lit_rlhf.models import ModelOptions, load_lm_head, load_scalar_model
from lit_rlhf.models.heads import copy_lm_head, read_lm_head
from tests.support.tiny_models import tiny_causal_lm

Folder = Callable[[str], Path]
IDS = torch.arange(4, 24).reshape(2, 10)
MASK = torch.ones(2, 10, dtype=torch.bool)


@torch.no_grad()
def test_scalar_model_with_lm_head_is_language_model(family: str, causal_folder: Folder) -> None:
    scalar = load_scalar_model(causal_folder(family), head_seed=0).eval()
    lm_head = load_lm_head(causal_folder(family))
    logits = logits_from_hidden(scalar, lm_head, hidden_states(scalar, IDS, MASK))
    torch.testing.assert_close(logits, token_logits(tiny_causal_lm(family), IDS, MASK))


def test_the_head_has_weights_of_its_own(causal_folder: Folder) -> None:
    model = tiny_causal_lm("qwen3")
    embedding, head = model.get_parameter("model.embed_tokens.weight"), copy_lm_head(model)
    assert torch.equal(head.weight, embedding)
    assert head.weight.data_ptr() != embedding.data_ptr()


def test_head_is_trained_unless_adapted(causal_folder: Folder) -> None:
    for rank in (0, 2):
        head = load_lm_head(causal_folder("llama"), ModelOptions(lora_rank=rank))
        assert head.weight.requires_grad is (rank == 0)


def test_unknown_changes_of_logits_are_refused() -> None:
    model = tiny_causal_lm("llama")
    model.lm_head.register_forward_hook(lambda _, __, logits: 2 * logits)
    with pytest.raises(ValueError, match="set lm_coef to 0"):
        copy_lm_head(model)


@pytest.mark.parametrize("names", [["other"], ["weight", "other"], ["bias"]])
def test_output_layer_with_other_names_is_refused(names: list[str], tmp_path: Path) -> None:
    file = tmp_path / "lm_head.safetensors"
    save_file({name: torch.ones(3, 2) for name in names}, file)
    with pytest.raises(ValueError, match=rf"path: expected a matrix `weight` .*{file.name}, got"):
        read_lm_head(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"path: expected a whole safetensors file"):
        read_lm_head(tmp_path)
