"""`python compare_export.py CHECKPOINT MODEL`: an exported model against the FSDP shards it was made of, and in use.

Run with the Python of the trainer. CHECKPOINT is the directory with the shards. Prints as its last line
{"tensors": n, "differing": [...], "chat": ..., "texts": [...]}: the weights have to be the shards' own, rounded to
bfloat16 as verl's merger does it; the texts are what vLLM generates with the model.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def joined(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights, of all ranks; a part is along the first dimension, as FSDP2 shards."""
    paths = sorted(checkpoint.glob("model_world_size_*_rank_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    ranks: list[dict[str, Any]] = [torch.load(path, weights_only=False, map_location="cpu") for path in paths]
    found = {}
    for name, first in ranks[0].items():
        parts = [getattr(rank[name], "_local_tensor", rank[name]) for rank in ranks]
        found[name] = torch.cat(parts) if hasattr(first, "_local_tensor") else parts[0]
    return found


def differing(checkpoint: Path, model: Path) -> tuple[int, list[str]]:
    """How many tensors the model has, and the names of those that are not the checkpoint's."""
    exported: dict[str, torch.Tensor] = {}
    for path in model.glob("*.safetensors"):
        exported |= load_file(path)
    trained = joined(checkpoint)
    tied = {"lm_head.weight"} if "lm_head.weight" not in exported else set()
    assert exported.keys() == trained.keys() - tied, sorted(exported.keys() ^ trained.keys())
    return len(exported), [name for name, value in exported.items() if not torch.equal(value, trained[name].bfloat16())]


def main() -> None:
    """See the module."""
    checkpoint, model = Path(sys.argv[1]), Path(sys.argv[2])
    tensors, names = differing(checkpoint, model)
    import transformers
    from vllm import LLM, SamplingParams

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "What is 3 plus 4?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    engine = LLM(str(model), enforce_eager=True, max_model_len=256, dtype="bfloat16", disable_log_stats=True)
    answers = engine.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    texts = [answer.outputs[0].text for answer in answers]
    lengths = [len(answer.outputs[0].token_ids) for answer in answers]
    print(json.dumps({"tensors": tensors, "differing": names, "chat": prompt, "texts": texts, "lengths": lengths}))


if __name__ == "__main__":
    main()
