"""`lit_rlhf init`: a base model and tokenizer from one's own text."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlhf.cli.main import main
from tests.support.evaluation_folders import write_lines

PAIRS = [
    {"prompt": f"what is {n} plus {n}?", "chosen": f"{2 * n} it is", "rejected": "no idea"}
    for n in range(20)
]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return write_lines(tmp_path / "pairs.jsonl", PAIRS)


def test_init_writes_a_model_of_the_sizes_asked_for(
    pairs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "base"
    text = tmp_path / "more.txt"
    text.write_text("abracadabra " * 50, "utf-8")
    sizes = ["--vocab", "300", "--layers", "1", "--hidden", "16", "--heads", "2"]
    words = ["init", "--data", pairs, str(text), "--output_dir", str(folder), *sizes]
    main([*words, "--max_positions", "64"])
    loaders = (AutoModelForCausalLM, AutoTokenizer)
    model, tokenizer = (loader.from_pretrained(folder) for loader in loaders)
    assert "300 tokens, 64 positions" in capsys.readouterr().out
    assert model.config.num_hidden_layers == 1
    assert model.config.hidden_size == 16
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("Grüße, 世界 <b>").input_ids) == "Grüße, 世界 <b>"
    # learned from both files, and from the roles of the template
    learned = set(tokenizer.get_vocab())
    assert {"Human", "Ġwhat", "Ġabracadabra"} <= learned
    dialogue = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rendered = tokenizer.apply_chat_template(dialogue, tokenize=False)
    assert rendered == "\n\nHuman: hi\n\nAssistant: yes<|endoftext|>"
    main([*words[:-2], *sizes[-2:], "--output_dir", str(tmp_path / "again")])
    names = [f / "tokenizer.json" for f in (folder, tmp_path / "again")]
    assert names[0].read_text("utf-8") == names[1].read_text("utf-8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab", "257"], r"vocab: expected at least 258 tokens .*, got 257"),
        (["--hidden", "100", "--heads", "3"], r"hidden as a multiple of 2 \* heads, got 3, 3"),
        (["--data", "lost.jsonl"], r"lost\.jsonl: no such file"),
        (["--output_dir", "."], r"output_dir: expected a free name, got \."),
    ],
)
def test_bad_flags_are_refused(pairs: str, tmp_path: Path, flags: list[str], message: str) -> None:
    words = ["init", "--data", pairs, "--output_dir", str(tmp_path / "base")]
    with pytest.raises(SystemExit, match=message):
        main([*words, *flags])
    assert not (tmp_path / "base").exists()
