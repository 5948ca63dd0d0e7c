"""docs/models.md agrees with the code on model folders, scores and adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import TaskType
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

from lit_rlhf.data import DialogueEncoder, Message
from lit_rlhf.forward import sequence_scores, supports_chunked_logits
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, load_tokenizer
from lit_rlhf.models.prepare import add_adapters
from lit_rlhf.modules import MemoryOptions, MinibatchOptions, RewardModule
from lit_rlhf.tools.doctor import RunPlan
from lit_rlhf.tools.doctor.memory import estimate_memory
from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "models.md"
OPTIONS = ("trainer.", "network.", "memory.", "minibatches.")  # of the page's other table


def executed(word: str) -> dict[str, Any]:
    """Names after the page's Python block that has a word."""
    (block,) = (
        b for b in blocks(PAGE) if b.language == "python" and not b.title and word in b.text
    )
    namespace: dict[str, Any] = {}
    exec(compile(block.text, "models.md", "exec"), namespace)
    return namespace


def score(folder: str | Path, dialogue: tuple[Message, ...]) -> float:
    """Score of a dialogue, rendered with the model's own template."""
    encoder = DialogueEncoder(load_tokenizer(folder), max_length=128)
    ids = encoder.encode_dialogue(dialogue).input_ids.long().unsqueeze(0)
    model = load_scalar_model(folder)
    with torch.no_grad():
        return float(sequence_scores(model, ids, torch.ones_like(ids, dtype=torch.bool))[0])


@pytest.mark.parametrize(("name", "scalar"), [("sft", False), ("reward", True), ("ppo_max", False)])
def test_a_folder_holds_the_files_of_the_table(quickstart: Path, name: str, scalar: bool) -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {file for row in rows for file in re.findall(r"`([\w.]+\.\w+)`", row)}
    table = {file for file in named if "." in file and not file.startswith(OPTIONS)}

    files = {path.name for path in (quickstart / name).iterdir() if path.is_file()}
    assert files == table - {"generation_config.json" if scalar else "lm_head.safetensors"}


def test_transformers_score_is_the_stages_score(workspace: Path) -> None:
    names = executed("apply_chat_template")

    dialogue = (Message("user", "name two metals."), Message("assistant", "iron and zinc."))
    assert names["score"] == pytest.approx(score("runs/quickstart/reward", dialogue), abs=1e-5)
    assert isinstance(names["response"], str)


def test_a_model_of_ones_own_is_optimized_by_the_same_call(workspace: Path) -> None:
    assert supports_chunked_logits(executed("optimize_forward")["model"])


def test_adapters_stay_in_float32_on_bfloat16_weights(quickstart: Path) -> None:
    model = load_causal_lm(quickstart / "sft", ModelOptions(dtype="bfloat16", lora_rank=2))

    types = {(".lora_" in name, p.dtype) for name, p in model.named_parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}


def network_of_7b(scalar: bool, lora_rank: int, in_4bit: bool, base: Any = None) -> Any:
    """LLaMA 7B in bfloat16 without content, in 4 bits and on another's frozen weights if asked."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
        max_position_embeddings=1536,
        num_labels=1,
    )
    auto: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    options = ModelOptions(lora_rank=lora_rank)
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
        model = add_adapters(model, options, TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM, 0)
        model.requires_grad_(False)
        shared = {} if base is None else dict(base.named_parameters())
        for name, parameter in list(model.named_parameters()):
            parent, _, attribute = name.rpartition(".")
            own = parameter
            if ".lora_" in name or "modules_to_save" in name:
                parameter.requires_grad_(True)
            elif in_4bit and "_proj" in name:
                # two weights to a byte, and a byte of scale to 64 weights
                count = parameter.numel() * 33 // 64
                own = torch.nn.Parameter(torch.empty(count, dtype=torch.uint8), False)
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            own = shared.get(plain, own)
            setattr(model.get_submodule(parent), attribute, own)
    return model


def rows_of_7b() -> Iterator[str]:
    """Rows of the page's table of memory, from the doctor's estimate."""
    for name, in_4bit, rollouts in (("bfloat16", False, 8), ("4 bits", True, 8)):
        reward = network_of_7b(True, 0, in_4bit)
        module = SimpleNamespace(
            policy=network_of_7b(False, 16, in_4bit),
            critic=network_of_7b(True, 16, in_4bit, reward),
            reference=None,
            reward=reward,
            network=ModelOptions(dtype="bfloat16", lora_rank=16, gradient_checkpointing=True),
            memory=MemoryOptions(rollout_batch_size=rollouts),
            minibatches=MinibatchOptions(micro_batch_size=2),
            sampling=SimpleNamespace(max_new_tokens=512),
            responses_per_prompt=1,
            encoder=None,
        )
        data, trainer = SimpleNamespace(batch_size=128), SimpleNamespace(precision="bf16-mixed")
        case: Any = SimpleNamespace(
            module=module, data=data, trainer=trainer, plan=RunPlan(on_gpu=True)
        )
        memory = estimate_memory(case)
        numbers = (
            memory.trained + memory.frozen,
            memory.rollout,
            memory.scoring,
            memory.update + memory.gradients,
            memory.peak,
        )
        yield f"| 7B, {name} | {' | '.join(f'{number / 2**30:.1f}' for number in numbers)} |"


@pytest.mark.slow  # two networks of LLaMA's layers get adapters, without content
def test_the_table_of_memory_is_the_doctors_estimate() -> None:
    shown = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| 7B, ")]
    expected = list(rows_of_7b())
    assert shown == expected
    assert float(expected[1].split("|")[-2]) < 0.9 * 24 < float(expected[0].split("|")[-2])


def test_a_reward_model_is_trained_on_without_the_language_models_loss(quickstart: Path) -> None:
    assert RewardModule(str(quickstart / "reward"), lm_coef=0.0).lm_head is None
    with pytest.raises(ValueError, match="expected a causal language model"):
        RewardModule(str(quickstart / "reward"))
