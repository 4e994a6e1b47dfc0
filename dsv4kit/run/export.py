"""An exported checkpoint: a directory of its own below the run, laid out like a run with one segment, its job.

    <run>/exports/NAME-step6/export.json    what is to be made of what          (written by the control plane)
    <run>/exports/NAME-step6/model/         the model, as vLLM and transformers load it; there once it is whole

Standard library only; frozen into every export.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dsv4kit.run.directory import RunDir
from dsv4kit.run.errors import DamagedFileError
from dsv4kit.run.files import read_object, write_json

FSDP = "fsdp"
HUGGING_FACE = "huggingface"


@dataclass(frozen=True)
class ExportRequest:
    """`checkpoint`: directory with an engine's part of a step. `form`: how its weights are stored there.

    FSDP has shards, which verl's merger joins and casts to bfloat16; HUGGING_FACE is a directory `weights` below it
    that Megatron-Bridge has written, taken over as it is. `chat_template`: text, for a tokenizer that has none.
    """

    checkpoint: str
    form: str
    weights: str
    chat_template: str | None = None


def place(run: RunDir, step: int) -> RunDir:
    """The directory of the export of a step."""
    return RunDir(run.path / "exports" / f"{run.name}-step{step}")


def model(export: RunDir) -> Path:
    """The exported model."""
    return export.path / "model"


def write(export: RunDir, request: ExportRequest) -> None:
    """Writes `export.json`."""
    write_json(_file(export), dataclasses.asdict(request))


def load(export: RunDir) -> ExportRequest:
    """Reads `export.json`. Raises DamagedFileError."""
    try:
        return ExportRequest(**read_object(_file(export)))
    except TypeError:
        raise DamagedFileError.of(_file(export), "what is to be exported") from None


def _file(export: RunDir) -> Path:
    return export.path / "export.json"
