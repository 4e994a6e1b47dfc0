"""Makes what a run on CPU trains on: a tiny random model, its tokenizer, and toy data. No download.

    python make_assets.py OUT_DIR          (the Python of the CPU runtime: torch, transformers, pyarrow)

OUT_DIR/
  model/         Qwen2, 2 layers, hidden 64, about 120,000 random fp32 parameters; byte-level BPE; ChatML template
  train.parquet  GRPO prompts          test.parquet   GRPO validation prompts          sft.parquet   conversations

The same bytes on every run. OUT_DIR appears complete or not at all; one that exists is left unchanged.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEED = 20260101
TRAIN_ROWS = 512  # 512 / 8 prompts a step = 64 steps an epoch
TEST_ROWS = 16
SFT_ROWS = 256
VOCABULARY = 320  # 256 bytes, 3 special tokens, a few merges
LONGEST_TEXT = 512  # tokens

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Every way in which text has broken a launcher, a shell, a YAML file or a log reader; one prompt in eight carries one.
AWKWARD = (
    "It's \"quoted\", isn't it?",
    "Cost: $5 or ${HOME} or $(date)?",
    "Run `ls -l` first.",
    "line one\nline two\n\ttabbed",
    "Grüße, 世界, здравствуй, 🙂",
    "back\\slash \\n not a newline",
    "{{ jinja }} {% raw %} {key: value} [1, 2]",
    "a=b, c:d; e|f & g > h < i # j % k ! l * m ? n ~ o",
)


def question(rng: random.Random, row: int) -> tuple[str, str]:
    """A sum in words, and its answer."""
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    text = f"What is {a} + {b}? Put the answer after ####."
    if row % 8 == 7:
        text = f"{AWKWARD[row // 8 % len(AWKWARD)]} {text}"
    return text, str(a + b)


def prompts(split: str, rows: int) -> list[dict[str, object]]:
    """Rows in the form verl's RL dataset and its reward functions read."""
    rng = random.Random(f"{SEED} {split}")
    table: list[dict[str, object]] = []
    for row in range(rows):
        text, answer = question(rng, row)
        table.append(
            {
                "data_source": "dsv4kit/digits",
                "prompt": [{"role": "user", "content": text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": split, "index": row},
            }
        )
    return table


def conversations(rows: int) -> list[dict[str, object]]:
    """Rows in the form verl's multi-turn SFT dataset reads."""
    rng = random.Random(f"{SEED} sft")
    table: list[dict[str, object]] = []
    for row in range(rows):
        text, answer = question(rng, row)
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"#### {answer}"}]
        table.append({"messages": turns})
    return table


def corpus() -> Iterator[str]:
    """Text that the tokenizer's few merges are learnt from."""
    rng = random.Random(f"{SEED} corpus")
    for row in range(500):
        yield question(rng, row)[0]
    yield from ("system user assistant\n", "#### 42")


def write_table(rows: list[dict[str, object]], path: Path) -> None:
    """Parquet by pyarrow alone: pandas would add its own version to the file."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_tokenizer(folder: Path) -> Any:
    """The tokenizer, also returned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # Digits stay single: an untrained model then writes few, and the toy reward (share of digits) starts near zero.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = LONGEST_TEXT
    fast.save_pretrained(folder)
    return fast


def write_model(folder: Path) -> None:
    """Tokenizer and random weights in Hugging Face form."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fast = write_tokenizer(folder)
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST_TEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)


def fill(folder: Path) -> None:
    """Everything, into a directory that is there."""
    write_model(folder / "model")
    write_table(prompts("train", TRAIN_ROWS), folder / "train.parquet")
    write_table(prompts("test", TEST_ROWS), folder / "test.parquet")
    write_table(conversations(SFT_ROWS), folder / "sft.parquet")


def make(out: Path, content: Callable[[Path], None] = fill) -> None:
    """`content` into `out`, through a temporary directory beside it and one rename."""
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        content(temporary)
        temporary.chmod(0o755)
        for file in temporary.rglob("*.safetensors"):
            file.chmod(0o644)  # written for the owner alone
        try:
            temporary.rename(out)
        except OSError:
            if not out.is_dir():  # else another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} OUT_DIR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make(Path(sys.argv[1]))
