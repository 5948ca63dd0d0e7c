"""A GGUF file becomes a plain folder, with the weights, tokens and template that it holds."""

import importlib.util
import struct
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlhf.cli.export import COMMAND
from lit_rlhf.data import TextContract
from lit_rlhf.export import load_gguf_model
from lit_rlhf.models import load_causal_lm, load_tokenizer
from tests.support.gguf_file import CHAT_TEMPLATE, QUANTIZATION, quantize, write_tiny_gguf
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_causal_lm, tiny_tokenizer

main = partial(COMMAND.run, prog="lit_rlhf export")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_the_folder_has_the_weights_of_the_file(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    main(["--checkpoint", str(file), "--output", str(output), "--chat_template", "tokenizer"])
    original = tiny_causal_lm().state_dict()
    plain = AutoModelForCausalLM.from_pretrained(output).state_dict()
    assert plain.keys() == original.keys()
    for name, weight in original.items():
        expected = weight
        if "down_proj" in name:
            blocks = gguf.dequantize(quantize(weight), QUANTIZATION)
            expected = torch.from_numpy(np.array(blocks))
            assert not torch.equal(expected, weight)
        assert torch.equal(plain[name], expected), name
    text = "".join(saved.read_text() for saved in output.glob("*.json"))
    assert "quantization" not in text
    assert file.name not in text
    assert str(file.parent) not in text
    ids = torch.arange(4, 28).view(2, 12)
    logits = load_causal_lm(output)(ids).logits
    assert (logits - tiny_causal_lm()(ids).logits).abs().max() < 0.05


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="the extra `gguf` asks for 5.23"
)
def test_folder_has_tokenizer_and_template_of_file(file: Path, tmp_path: Path) -> None:
    main(["--checkpoint", str(file), "--output", str(tmp_path), "--chat_template", "tokenizer"])
    expected, tokenizer = tiny_tokenizer(), load_tokenizer(tmp_path)
    for text in ("Human: name three metals", "说出三种金属"):
        ids = expected(text, add_special_tokens=False).input_ids
        assert tokenizer(text, add_special_tokens=False).input_ids == ids
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == CHAT_TEMPLATE
    assert TextContract.load(tmp_path).chat_template == CHAT_TEMPLATE


def test_weights_may_be_cast(file: Path, tmp_path: Path) -> None:
    load_gguf_model(file, dtype="bfloat16").save(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_network_that_the_file_does_not_fill_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(32)
    writer.add_context_length(4096)
    writer.add_embedding_length(4096)
    writer.add_feed_forward_length(11008)
    writer.add_head_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"that its weights fill, got .*empty\.gguf"):
        load_gguf_model(path)


def test_layers_that_the_file_does_not_count_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        count = gguf.GGUFWriter.add_block_count
        patched.setattr(gguf.GGUFWriter, "add_block_count", lambda writer, _: count(writer, 1))
        write_tiny_gguf(tmp_path / "few.gguf")
    message = r"all weights in .*few\.gguf, got LlamaForCausalLM without blk\.1\."
    with pytest.raises(ValueError, match=message):
        load_gguf_model(tmp_path / "few.gguf")


def test_weights_that_the_file_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        add = gguf.GGUFWriter.add_tensor

        def add_others(writer: gguf.GGUFWriter, name: str, *values: Any, **options: Any) -> None:
            if name != "blk.1.attn_v.weight":
                add(writer, name, *values, **options)

        patched.setattr(gguf.GGUFWriter, "add_tensor", add_others)
        write_tiny_gguf(tmp_path / "less.gguf")
    message = r"all weights of .*less\.gguf, got no model\.layers\.1\.self_attn\.v_proj\.weight$"
    with pytest.raises(ValueError, match=message):
        load_gguf_model(tmp_path / "less.gguf")


def test_unreadable_files_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"network: expected policy or model .* got 'reward'"):
        load_gguf_model(file, network="reward")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"checkpoint: expected a GGUF file .*broken"):
        load_gguf_model(broken)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 20)
    broken.write_bytes(header + b"general.architecture" + struct.pack("<II", 4, 5))  # a number
    with pytest.raises(ValueError, match=r"checkpoint: expected a GGUF file .*broken"):
        load_gguf_model(broken)
    with pytest.raises(ValueError, match=r"checkpoint: expected a GGUF file .*missing"):
        load_gguf_model(tmp_path / "missing.gguf")
    with pytest.raises(ValueError, match=r"got the file .*from a checkpoint or a GGUF file"):
        load_causal_lm(str(file))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install gguf"):
        load_gguf_model(file)
