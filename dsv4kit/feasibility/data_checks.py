"""Data looked at before a run is submitted: the right kind, the right types, enough rows, rewards that exist.

The control plane has no pyarrow, so of a Parquet file the footer is read (`parquet_footer`): schema, row count, and the
least and greatest value of each column over all rows, which settles more than the first rows would: whether any ground
truth is empty or missing, and whether `data_source` is known to verl where all rows have the same. What a writer did
not note becomes a note to the user, not a refusal. Of JSON lines the first rows are read.

Columns: verl `utils/dataset/rl_dataset.py`, `utils/dataset/multiturn_sft_dataset.py`; dispatch by source:
`utils/reward_score/__init__.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4kit.config.schema import Settings
from dsv4kit.feasibility import parquet_footer
from dsv4kit.feasibility.parquet_footer import Column, Footer
from dsv4kit.verl_keys.pairs import is_sft

_TEXT = "BYTE_ARRAY"
_FIRST_ROWS = 100
# Sources verl has a reward for; any that begins with `aime` too.
KNOWN_SOURCES = frozenset(
    (
        "openai/gsm8k",
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math_dapo",
        "math",
        "math_dapo_reasoning",
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
        "codecontests",
        "apps",
        "codeforces",
        "taco",
        "hiyouga/geometry3k",
        "searchR1_nq",
        "searchR1_triviaqa",
        "searchR1_popqa",
        "searchR1_hotpotqa",
        "searchR1_2wikimultihopqa",
        "searchR1_musique",
        "searchR1_bamboogle",
    )
)


@dataclass
class DataReport:
    """What is wrong, and what could not be looked at from here; one line each."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(settings: Settings, sources: Mapping[str, str]) -> DataReport:
    """All files the user named."""
    report = DataReport()
    for key in ("train_files", "val_files"):
        files = getattr(settings.data, key) or []
        rows: int | None = 0
        for path in files:
            source = sources.get(f"data.{key}", f"data.{key}")
            found = _file(path, f"{source}: {path}", settings, report)
            rows = None if rows is None or found is None else rows + found
        batch = settings.data.train_batch_size
        if key == "train_files" and files and rows is not None and rows < batch and not report.problems:
            report.problems.append(
                f"{sources.get('data.train_files', 'data.train_files')}: {rows} rows are fewer than a batch of"
                f" {batch}, so an epoch would have no step; give more rows or set SET=data.train_batch_size=..."
            )
    return report


def _file(path: str, shown: str, settings: Settings, report: DataReport) -> int | None:
    """Rows of one file; None where they were not counted."""
    suffix = path.rpartition(".")[2].lower()
    if suffix in ("json", "jsonl") and not is_sft(settings):
        report.problems += [f"{shown}: {problem}" for problem in _json(path, settings, report)]
        return None
    if suffix != "parquet":
        kinds = ".parquet" if is_sft(settings) else ".parquet, .json and .jsonl"
        report.problems.append(f"{shown}: verl reads {kinds}")
        return None
    try:
        footer = parquet_footer.read(path)
    except (parquet_footer.ParquetError, OSError) as error:
        report.problems.append(f"{shown}: {error}")
        return None
    found = list(_sft(footer) if is_sft(settings) else _grpo(footer, settings, shown, report))
    report.problems += [f"{shown}: {problem}" for problem in found]
    return footer.rows


def _sft(footer: Footer) -> Iterator[str]:
    if "messages" not in footer.names:
        kind = "; `prompt` makes it data for GRPO" if "prompt" in footer.names else ""
        yield f"SFT needs a column `messages`; it has {', '.join(footer.names) or 'none'}{kind}"
        return
    yield from _conversation(footer, "messages")


def _grpo(footer: Footer, settings: Settings, shown: str, report: DataReport) -> Iterator[str]:
    missing = [name for name in ("prompt", "data_source", "reward_model") if name not in footer.names]
    if missing:
        kind = "; `messages` makes it data for SFT" if "messages" in footer.names else ""
        yield f"GRPO needs a column `{missing[0]}`; it has {', '.join(footer.names) or 'none'}{kind}"
        return
    yield from _conversation(footer, "prompt")
    truth = footer.columns.get("reward_model.ground_truth")
    source = footer.columns.get("data_source", Column("nested"))
    if truth is None:
        yield "`reward_model` has no field `ground_truth`, which the reward compares with"
    else:
        yield from _filled("reward_model.ground_truth", truth, shown, report)
    yield from _filled("data_source", source, shown, report)
    if settings.reward.function_path is None and source.type == _TEXT:
        yield from _known(source, shown, report)


def _conversation(footer: Footer, name: str) -> Iterator[str]:
    for part in ("role", "content"):
        column = footer.columns.get(f"{name}.{part}")
        nested = any(path.startswith(f"{name}.{part}.") for path in footer.columns)
        if column is None and not nested:
            yield f"`{name}` must be a list of {{role, content}}; there is no `{part}` in it"
            return
        if column is not None and column.type != _TEXT:
            yield f"`{name}.{part}` is {column.type}, not text"
    column = footer.columns.get(f"{name}.role")
    if column is not None and column.low == b"":
        yield f"`{name}.role` is empty in some row"


def _filled(name: str, column: Column, shown: str, report: DataReport) -> Iterator[str]:
    if column.type != _TEXT:
        yield f"`{name}` is {column.type}, not text"
    elif column.nulls:
        yield f"`{name}` is missing in {column.nulls} rows"
    elif column.low == b"":
        yield f"`{name}` is empty in some row"
    elif column.low is None:
        report.notes.append(f"{shown}: its writer noted no values of `{name}`: empty ones would show on the nodes only")


def _known(column: Column, shown: str, report: DataReport) -> Iterator[str]:
    if column.low is None or column.high is None:
        return
    for value in dict.fromkeys((column.low, column.high)):
        if problem := reward_problem(value.decode(errors="replace")):
            yield problem
            return
    if column.low != column.high:
        report.notes.append(
            f"{shown}: `data_source` varies; verl knows {column.low.decode()} and {column.high.decode()}, those between"
            " were not looked at"
        )


def reward_problem(name: str) -> str | None:
    """Why rows with this `data_source` would get no reward from verl; None where it has one."""
    if name in KNOWN_SOURCES or name.startswith("aime"):
        return None
    return (
        f"`data_source` is {name!r}, for which verl has no reward: it would fail at the first one, minutes into the"
        " run; SET=reward.function_path=... brings your own"
    )


def _json(path: str, settings: Settings, report: DataReport) -> Iterator[str]:
    """The first rows of JSON lines."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = list(itertools.islice(file, _FIRST_ROWS))
    except (OSError, UnicodeDecodeError) as error:
        yield f"cannot be read: {error}"
        return
    if lines and lines[0].lstrip().startswith("["):
        report.notes.append(f"{path}: one JSON array is not looked into from here")
        return
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            yield f"line {number} is not JSON"
            return
        if problem := _row(row, settings):
            yield f"line {number}: {problem}"
            return


def _row(row: Any, settings: Settings) -> str | None:
    if not isinstance(row, dict):
        return "not an object"
    if "prompt" not in row:
        return "no `prompt`" + ("; `messages` makes it data for SFT" if "messages" in row else "")
    prompt, model = row["prompt"], row.get("reward_model")
    if not isinstance(prompt, list) or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        return "`prompt` must be a list of {role, content}"
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    if not isinstance(truth, str) or not truth:
        return "`reward_model.ground_truth` is missing, empty or not text"
    if not isinstance(row.get("data_source"), str):
        return "`data_source` is missing or not text"
    return reward_problem(row["data_source"]) if settings.reward.function_path is None else None
