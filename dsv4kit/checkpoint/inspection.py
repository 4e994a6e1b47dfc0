"""verl's checkpoints on disk: which are complete, and why the others are not. Nothing here changes a checkpoint.

verl 0.9.1 writes, in this order (trainer/ppo/v1/trainer_base.py `_save_checkpoint`, utils/checkpoint/*.py):

    <checkpoint_dir>/global_step_N/actor/...           the shards; Megatron closes them with ckpt_contents.json
    <checkpoint_dir>/global_step_N/critic/...          only with a critic
    <checkpoint_dir>/global_step_N/data.pt             the data loader
    <checkpoint_dir>/latest_checkpointed_iteration.txt the tracker: a plain open("w"), so a kill can leave it empty

SFT has the same files without the `actor/` level, one `data_<dp_rank>.pt` per data-parallel rank, and renames its
tracker into place. The kit adds `global_step_N/dsv4kit.sizes.json`: every file's size, recorded once the step was seen
complete.

Megatron-FSDP (everything in one `model/dist_ckpt`, no `metadata.json`) is not supported; no recipe of the kit uses it.

Standard library only; used on the compute nodes. `checkpoint_repair` acts on what is found here, `retention` prunes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from dsv4kit.checkpoint.shard_files import (
    FileSizes,
    dist_ckpt_problems,
    ends_problems,
    file_problems,
    huggingface_problems,
    read_json_object,
    show,
    sync_tree,
    walk_sizes,
)
from dsv4kit.checkpoint.tracker import Tracker, read_tracker_state
from dsv4kit.run.files import is_version_of, replacement

SIZES_NAME = "dsv4kit.sizes.json"
MANIFEST_NAME = "ckpt_contents.json"
CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""What verl's `checkpoint.save_contents` and `load_contents` may name."""

_STEP_PREFIX = "global_step_"
_STEP_NAME = re.compile(_STEP_PREFIX + r"(0|[1-9][0-9]{0,17})")
_SHARD_NAME = re.compile(r"(model|optim|extra_state)_world_size_([0-9]{1,6})_rank_([0-9]{1,6})\.pt")
_DATA_NAME = re.compile(r"data_([0-9]{1,5})\.pt")
_FSDP_PREFIX = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
_ROLES = ("actor", "critic")
_LONGEST_LIST = 8
"""Missing files named one by one; beyond this they are counted."""


class CheckpointError(Exception):
    """A checkpoint directory that cannot be used as asked; `evidence` holds what was found, one readable line each."""

    def __init__(self, message: str, evidence: Iterable[str] = ()) -> None:
        self.evidence = tuple(evidence)
        super().__init__("\n  ".join([message, *self.evidence]))


class CheckpointLayout(Enum):
    """Who wrote a step directory."""

    PPO_FSDP = "ppo-fsdp"
    PPO_MEGATRON = "ppo-megatron"
    SFT_FSDP = "sft-fsdp"
    SFT_MEGATRON = "sft-megatron"


@dataclass(frozen=True)
class StepState:
    """One `global_step_N`.

    `problems`: damage, one line a finding, each naming its file relative to the step directory.
    `absent`: expected contents of which nothing was saved (a setting, not damage).
    `unreadable`: errors of the file system; what the directory holds is unknown.
    `world_size`: ranks that wrote it, where it says so.
    `shell`: only the data loader's state is left (verl's own pruning does that).
    `recorded`: it has our size record, so it was complete once.
    """

    step: int
    path: Path
    layout: CheckpointLayout | None = None
    problems: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()
    world_size: int | None = None
    shell: bool = False
    recorded: bool = False
    file_count: int = 0
    total_bytes: int = 0

    @property
    def complete(self) -> bool:
        return not (self.problems or self.absent or self.unreadable)

    @property
    def findings(self) -> tuple[str, ...]:
        """All that speaks against this step, as readable lines."""
        return self.problems + tuple(f"{name} was not saved" for name in self.absent) + self.unreadable


@dataclass(frozen=True)
class CheckpointState:
    """A checkpoint directory at one moment; `steps` in ascending order."""

    directory: Path
    tracker: Tracker
    steps: tuple[StepState, ...]

    def at(self, step: int | None) -> StepState | None:
        return next((state for state in self.steps if state.step == step), None)

    @property
    def complete(self) -> tuple[StepState, ...]:
        return tuple(state for state in self.steps if state.complete)

    @property
    def resumable(self) -> StepState | None:
        """The step the tracker names where that is complete, else the newest complete one."""
        named = self.at(self.tracker.step)
        return named if named and named.complete else self.at(self.newest_complete)

    @property
    def newest_complete(self) -> int | None:
        return max((state.step for state in self.complete), default=None)


def inspect(
    directory: Path,
    expected_contents: Collection[str] | None = None,
    data_ranks: int | None = None,
    to_resume: bool = False,
    wished: int | None = None,
) -> CheckpointState:
    """Every `global_step_N` of `directory`, with the reasons where one is not complete.

    `expected_contents`: what resuming will load (verl's `load_contents`); None asks for the model only, and for every
    other content of which a part is found. `data_ranks`: data-parallel ranks of an SFT run (its `data_<rank>.pt`),
    where known. `to_resume`: the step that would be resumed from (`wished`, where given) has its shards opened, also
    where their recorded sizes hold (thousands of files, so no other step has). A directory that does not exist has no
    steps. Other names in it (`global_step_7.bak`, files of the user) are ignored. Errors of the file system within a
    step go to its `unreadable`; raises OSError for the directory itself.
    """
    unknown = set(expected_contents or ()) - set(CONTENTS)
    if unknown:
        raise ValueError(f"unknown checkpoint contents {sorted(unknown)}; known: {', '.join(CONTENTS)}")
    steps = [inspect_step(path, expected_contents, data_ranks) for path in step_directories(directory)]
    state = CheckpointState(directory, read_tracker_state(directory), tuple(steps))
    looked: set[int] = set()
    while to_resume and (step := state.at(wished) if wished else state.resumable) and step.step not in looked:
        looked.add(step.step)
        found = _with_ends(step)
        state = replace(state, steps=tuple(found if one is step else one for one in state.steps))
    return state


def _with_ends(step: StepState) -> StepState:
    """The step with what the first and last bytes of its shards show; one without recorded sizes was looked into."""
    if not (step.recorded and step.complete):
        return step
    try:
        files = walk_sizes(step.path)
        return replace(step, problems=tuple(ends_problems(step.path, sorted(files), files)[:_LONGEST_LIST]))
    except OSError as error:
        return replace(step, unreadable=(_unreadable(error, step.path),))


def step_directory(directory: Path, step: int) -> Path:
    """Where verl puts the checkpoint of a step."""
    return directory / f"{_STEP_PREFIX}{step}"


def step_directories(directory: Path) -> list[Path]:
    """Everything named `global_step_N` in `directory`, in ascending order of N; whether it is a directory or not."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    steps = sorted((int(match[1]), name) for name in names if (match := _STEP_NAME.fullmatch(name)))
    return [directory / name for _, name in steps]


def actor_directory(step_directory: Path) -> Path:
    """Where a step of GRPO keeps the trained model."""
    return step_directory / _ROLES[0]


def weight_bytes(directory: Path) -> int:
    """Bytes of the weights directly in `directory`: FSDP's shards of the model, or a Hugging Face directory's files."""
    shards = (name for name in os.listdir(directory) if name.endswith((".safetensors", ".bin", ".pt")))
    wanted = (name for name in shards if not name.endswith(".pt") or name.startswith(f"{_FSDP_PREFIX['model']}_"))
    return sum((directory / name).stat().st_size for name in wanted)


def inspect_step(
    path: Path, expected_contents: Collection[str] | None = None, data_ranks: int | None = None
) -> StepState:
    """One `global_step_N`; arguments as for `inspect`."""
    match = _STEP_NAME.fullmatch(path.name)
    if not match:
        raise ValueError(f"{path} is not a step directory")
    step = int(match[1])
    try:
        if not path.is_dir():
            return StepState(step, path, problems=(f"{path.name} is not a directory",))
        files = walk_sizes(path)
        return _StepInspection(step, path, files, expected_contents, data_ranks).result()
    except OSError as error:
        return StepState(step, path, unreadable=(_unreadable(error, path),))


def _unreadable(error: OSError, path: Path) -> str:
    return f"cannot read {show(str(error.filename or path))}: {error.strerror}"


class _StepInspection:
    """The findings about one step directory while they are collected."""

    def __init__(
        self, step: int, path: Path, files: FileSizes, expected: Collection[str] | None, data_ranks: int | None
    ) -> None:
        self.step, self.path, self.files = step, path, files
        self.expected, self.data_ranks = expected, data_ranks
        self.problems: list[str] = []
        self.contents: set[str] = set()
        self.world_size: int | None = None
        recorded = _recorded_sizes(path) if SIZES_NAME in files else None
        self.recorded = recorded is not None
        size_problems = _size_problems(recorded or {}, files)
        self.problems += size_problems
        # Where all recorded sizes hold, the files were looked into once and need no second look.
        self.trusted: FileSizes = {} if size_problems else (recorded or {})

    def result(self) -> StepState:
        ppo = any(name.startswith(("actor/", "critic/")) for name in self.files) or "data.pt" in self.files
        engines = [self._role("actor/")] if ppo else [self._role("")]
        if ppo and any(name.startswith("critic/") for name in self.files):
            engines.append(self._role("critic/"))
        self._data_loader(ppo)
        if self.step == 0:
            self.problems.append("verl saves no step 0")
        missing = [name for name in self.expected or ("model",) if name not in self.contents]
        shell = bool(self.files) and all(
            name == SIZES_NAME or name == "data.pt" or _DATA_NAME.fullmatch(name) for name in self.files
        )
        return StepState(
            step=self.step,
            path=self.path,
            layout=CheckpointLayout(f"{'ppo' if ppo else 'sft'}-{engines[0]}") if engines[0] else None,
            problems=tuple(dict.fromkeys(self.problems)),
            absent=() if self.problems else tuple(missing),
            contents=tuple(name for name in CONTENTS if name in self.contents),
            world_size=self.world_size,
            shell=shell,
            recorded=self.recorded,
            file_count=len(self.files),
            total_bytes=sum(self.files.values()),
        )

    def _role(self, prefix: str) -> str | None:
        """Findings about the engine below `prefix` (SFT: an empty one); returns which engine wrote it."""
        names = [name[len(prefix) :] for name in self.files if name.startswith(prefix)]
        if MANIFEST_NAME not in names and any(
            name == "fsdp_config.json" or name.startswith("huggingface/") or _SHARD_NAME.fullmatch(name)
            for name in names
        ):
            self._fsdp(prefix, names)
            return "fsdp"
        known = (MANIFEST_NAME, "transformer_config.json")
        if any(name in known or name.startswith(("model/", "optimizer/", "extra/")) for name in names):
            self._megatron(prefix)
            return "megatron"
        self.problems.append(
            f"{prefix or self.path.name + '/'} holds no checkpoint (neither shards nor {MANIFEST_NAME})"
        )
        return None

    def _fsdp(self, prefix: str, names: list[str]) -> None:
        """Every rank 0..W-1 of each saved content, one W (fsdp_checkpoint_manager.py `save_checkpoint`)."""
        ranks: dict[tuple[str, int], set[int]] = {}
        for name in names:
            if match := _SHARD_NAME.fullmatch(name):
                ranks.setdefault((match[1], int(match[2])), set()).add(int(match[3]))
        sizes = {world for _, world in ranks}
        config = prefix + "fsdp_config.json"
        if config not in self.files:
            self.problems.append(f"{config} is missing")
        else:
            declared = (self._json(config) or {}).get("world_size")
            if not isinstance(declared, int):
                self.problems.append(f"{config} is unreadable or cut short")
            else:
                sizes.add(declared)
        if len(sizes) > 1:
            self.problems.append(
                f"{prefix or './'} mixes shards of {' and '.join(map(str, sorted(sizes)))} ranks (*_world_size_W_*.pt)"
            )
            return
        world = self._note_world_size(next(iter(sizes), 0))
        for content, stem in _FSDP_PREFIX.items():
            if not ranks.get((stem, world)):
                continue
            self.contents.add(content)
            self._files(f"{prefix}{stem}_world_size_{world}_rank_{rank}.pt" for rank in range(world))
        hub = prefix + "huggingface/"
        if any(name.startswith(hub) and name.endswith((".safetensors", ".bin")) for name in self.files):
            self.contents.add("hf_model")
            self._tree(hub, huggingface_problems)

    def _megatron(self, prefix: str) -> None:
        """What the manifest lists is there and whole (megatron_checkpoint_manager.py `_build_checkpoint_manifest`)."""
        manifest_name = prefix + MANIFEST_NAME
        if manifest_name not in self.files:
            self.problems.append(f"{manifest_name} is missing (written last: this save was not finished)")
            return
        manifest = self._json(manifest_name) or {}
        contents, saved = manifest.get("contents"), manifest.get("save_contents")
        if not isinstance(contents, dict) or not isinstance(saved, list):
            self.problems.append(f"{manifest_name} is unreadable or cut short")
            return
        if manifest.get("global_step") != self.step:
            self.problems.append(f"{manifest_name} is of step {manifest.get('global_step')}, not of step {self.step}")
        world = manifest.get("world_size")
        self._note_world_size(world if isinstance(world, int) else 0)
        self.contents |= {name for name in CONTENTS if name in saved}
        keys = {"extra": "rng_state"}
        for name in saved:
            if name in CONTENTS and not isinstance(contents.get(keys.get(name, name)), dict):
                self.problems.append(f"{manifest_name} does not say where {name} lies")
        trees: dict[str, str] = {}
        for entry in contents.values():
            if isinstance(entry, dict) and isinstance(entry.get("path"), str):
                form = str(entry.get("format"))
                trees.setdefault(str(entry.get("peft_adapter_path") or entry["path"]), form)
        adapters = tuple(path for path in trees if path.endswith("/adapter"))
        for tree, form in sorted(trees.items()):
            if form == "megatron_dist_checkpoint":
                self._tree(f"{prefix}{tree}/", dist_ckpt_problems)
            elif form == "huggingface" and f"{tree}/adapter" not in adapters:
                self._tree(f"{prefix}{tree}/", huggingface_problems)
            elif form == "json":
                self._whole_json(prefix + tree)
        described = contents.get("hf_config")
        if isinstance(described, dict) and isinstance(described.get("path"), str):
            self._whole_json(
                f"{prefix}{described['path']}/config.json"
            )  # the bridge reads it when it loads the weights

    def _data_loader(self, ppo: bool) -> None:
        """`data.pt`, or for SFT `data_0.pt` ... without a gap; else verl restarts the data order and merely warns."""
        if ppo:
            self._files(["data.pt"])
            return
        found = {int(match[1]) for name in self.files if (match := _DATA_NAME.fullmatch(name))}
        count = self.data_ranks or max(found, default=0) + 1
        if self.data_ranks is None and self.world_size and self.world_size % count:
            self.problems.append(f"data_{count}.pt is missing ({self.world_size} ranks cannot form {count} data ranks)")
        self._files(f"data_{rank}.pt" for rank in range(min(count, 100_000)))

    def _note_world_size(self, world: int) -> int:
        self.world_size = world or self.world_size
        return world

    def _json(self, name: str) -> dict[str, Any] | None:
        return read_json_object(self.path / name)

    def _whole_json(self, name: str) -> None:
        if name not in self.files:
            self.problems.append(f"{show(name)} is missing")
        elif self._json(name) is None:
            self.problems.append(f"{show(name)} is unreadable or cut short")

    def _files(self, names: Iterable[str]) -> None:
        unseen = [name for name in names if name not in self.trusted]
        missing = [name for name in unseen if name not in self.files]
        problems = file_problems(self.path, missing[:_LONGEST_LIST], self.files)
        if len(missing) > _LONGEST_LIST:
            problems.append(f"{len(missing) - _LONGEST_LIST} more files are missing, up to {show(missing[-1])}")
        self.problems += problems
        self.problems += file_problems(self.path, [name for name in unseen if name in self.files], self.files)

    def _tree(self, tree: str, check: Callable[[Path, str, FileSizes], list[str]]) -> None:
        if not any(name.startswith(tree) for name in self.trusted):
            problems = check(self.path, tree, self.files)
            self.problems += problems[:_LONGEST_LIST]
            if len(problems) > _LONGEST_LIST:
                self.problems.append(f"{len(problems) - _LONGEST_LIST} more problems in {show(tree)}")


def record_sizes(
    step_dir: Path, expected_contents: Collection[str] | None = None, data_ranks: int | None = None
) -> StepState:
    """Write `dsv4kit.sizes.json` into a complete step directory: path -> bytes, so that later loss is found.

    To be called once the tracker names the step; its files are on disk before their sizes are. Raises CheckpointError
    where the step is not complete (SFT may write its tracker before the last `data_<rank>.pt`: try again) and OSError
    where it cannot be written. Returns what was seen.
    """
    sync_tree(step_dir)
    state = inspect_step(step_dir, expected_contents, data_ranks)
    if not state.complete:
        raise CheckpointError(f"{step_dir} is not complete; its sizes are not recorded", state.findings)
    files = {name: size for name, size in sorted(walk_sizes(step_dir).items()) if not is_version_of(name, SIZES_NAME)}
    record = {"version": 1, "step": state.step, "files": files}
    with replacement(step_dir / SIZES_NAME) as temporary:  # verl may have pruned the step since: it is not made again
        temporary.write_text(json.dumps(record, indent=0))
    return state


def _recorded_sizes(step_dir: Path) -> FileSizes | None:
    """Our record, or None where it is missing or garbage: it is an aid, a checkpoint stands without it."""
    files = (read_json_object(step_dir / SIZES_NAME) or {}).get("files")
    if not isinstance(files, dict) or not all(isinstance(size, int) for size in files.values()):
        return None
    return files


def _size_problems(recorded: FileSizes, files: FileSizes) -> list[str]:
    lost = sorted(name for name, size in recorded.items() if files.get(name) != size)
    problems = []
    for name in lost[:_LONGEST_LIST]:
        was = f"{recorded[name]} bytes recorded"
        now = files.get(name)
        problems.append(f"{show(name)} is missing ({was})" if now is None else f"{show(name)} has {now} bytes ({was})")
    if len(lost) > _LONGEST_LIST:
        problems.append(f"{len(lost) - _LONGEST_LIST} more files differ from their recorded size")
    return problems
