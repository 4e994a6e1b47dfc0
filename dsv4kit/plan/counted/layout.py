"""Pipeline layouts: Megatron's string notation read, checked, and generated.

A string names what each pipeline stage holds: `E` embedding, `t` decoder layer, `m` MTP layer, `L` head and loss;
`|` separates stages, `x*n` repeats a symbol, `(xy|)*n` a group, commas mean nothing. Notation and rules:
Megatron-LM `pipeline_parallel_layer_layout.py`; the rule on hash layers: `transformer_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.plan.counted import geometry as geo

NOTATION = "Megatron-LM pipeline_parallel_layer_layout.py"
CONFIG = "Megatron-LM transformer_config.py"
KIT = "dsv4kit"

_GROUP = re.compile(r"\(([^()]*)\)\*([0-9]+)|([EtmL|])\*([0-9]+)|([EtmL|])")
_MAX_SYMBOLS = 10_000


class LayoutRules(NamedTuple):
    """What a layout has to hold."""

    pipeline: int
    num_layers: int
    hash_layers: int
    mtp_layers: int


class PipelineStage(NamedTuple):
    """What one pipeline rank holds; `layers` are indices of decoder layers."""

    embedding: bool
    layers: tuple[int, ...]
    mtp: int
    head: bool


class StageWeights(NamedTuple):
    """What embedding, head and MTP count in a stage, in decoder layers: by memory, and by time (`head_s`, `mtp_s`)."""

    embedding: float = 0.5
    head: float = 0.5
    mtp: float = 1.5
    head_s: float = 1.0
    mtp_s: float = 2.0


def weights_for(
    g: geo.ModelShape, expert: int, ranks: int | None = None, held_bytes: float = 6, state_bytes: float = 12
) -> StageWeights:
    """Memory beside a layer's on one rank, and the parameters a token passes beside a layer's.

    `held_bytes` per parameter on the rank, `state_bytes` per parameter whose optimizer state it owns: dense ones are
    shared by the stage's `ranks` (None: as many as `expert`), experts by ranks / expert. Megatron builds an embedding
    beside the MTP layer too (`pre_process or mtp_process`).
    """
    ranks = ranks or expert

    def size(dense: float, experts: float) -> float:
        return held_bytes * (dense + experts / expert) + state_bytes * (dense + experts) / ranks

    dense, experts = geo.layer_dense_params(g, geo.HCA), geo.layer_expert_params(g)
    layer, embedding = size(dense, experts), size(geo.embedding_params(g), 0)
    active = dense + g.experts_per_token * geo.expert_params(g)
    head = geo.head_params(g) / active
    return StageWeights(
        embedding=embedding / layer,
        head=size(geo.head_params(g), 0) / layer,
        mtp=(size(geo.mtp_dense_params(g), experts) + embedding) / layer,
        head_s=head,
        mtp_s=1 + 2 * g.hidden_size**2 / active + head,
    )


def _broken(text: str, rule: str, source: str) -> UserError:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return UserError(f"layout {shown!r}: {rule} ({source})")


def parse(text: str) -> tuple[str, ...]:
    """The stages of a layout string in order, each as its symbols written out (`Ettt`)."""
    return tuple(_expanded(text.replace(",", ""), text, nested=False).split("|"))


def _expanded(part: str, text: str, nested: bool) -> str:
    pieces: list[str] = []
    size = position = 0
    while position < len(part):
        match = _GROUP.match(part, position)
        if match is None or (nested and match.group(1) is not None):
            raise _broken(
                text, f"cannot read {part[position : position + 8]!r}; it knows E t m L | x*n (..)*n", NOTATION
            )
        group, group_count, symbol, symbol_count, single = match.groups()
        count_text = group_count or symbol_count
        if count_text is not None and not 0 < int(count_text[:9]) <= _MAX_SYMBOLS:
            raise _broken(text, f"repeat count {count_text[:9]} is not between 1 and {_MAX_SYMBOLS}", KIT)
        count = int(count_text[:9]) if count_text else 1
        unit = _expanded(group, text, nested=True) if group is not None else (symbol or single)
        size += len(unit) * count
        if size > _MAX_SYMBOLS:
            raise _broken(text, f"more than {_MAX_SYMBOLS} symbols", KIT)
        pieces.append(unit * count)
        position = match.end()
    return "".join(pieces)


def check(text: str, rules: LayoutRules) -> tuple[PipelineStage, ...]:
    """The stages by pipeline rank; the first broken rule is a `UserError` that names it and its source."""
    chunks = parse(text)
    if len(chunks) != rules.pipeline:
        why = f"{len(chunks)} stages for PP={rules.pipeline}; one each"
        if len(chunks) > rules.pipeline:
            why += ", virtual stages are neither passed on to verl nor planned for"
        raise _broken(text, why, KIT)
    flat = "".join(chunks)
    layers = flat.count("t")
    if layers != rules.num_layers:
        few = "too few" if layers < rules.num_layers else "too many"
        raise _broken(text, f"{few} layers: holds {layers} of t, the model has {rules.num_layers}", NOTATION)
    if flat[:1] != "E" or flat.count("E") != 1:
        raise _broken(text, "E stands first, once", NOTATION)
    if flat[-1:] != "L" or flat.count("L") != 1:
        raise _broken(text, "L stands last, once", NOTATION)
    _check_mtp(text, chunks, rules)
    held = chunks[0].count("t")
    if held < min(rules.hash_layers, rules.num_layers):
        raise _broken(
            text, f"stage 0 holds {held} layers, all {rules.hash_layers} hash layers must be in the stage of E", CONFIG
        )
    if "" in chunks:
        raise _broken(text, f"stage {chunks.index('')} is empty", KIT)
    return _stages(chunks)


def _check_mtp(text: str, chunks: Sequence[str], rules: LayoutRules) -> None:
    flat = "".join(chunks)
    found = flat.count("m")
    if found and not rules.mtp_layers:
        raise _broken(text, "holds m, but MTP is off (verl then builds no MTP layer)", NOTATION)
    if found != rules.mtp_layers:
        raise _broken(text, f"holds {found} of m, the model has {rules.mtp_layers} MTP layers", NOTATION)
    if not found:
        return
    if "t" in flat[flat.index("m") :]:
        raise _broken(text, "m stands after every t", NOTATION)
    if sum("m" in chunk for chunk in chunks) > 1:
        raise _broken(text, "all m stand in one stage", NOTATION)


def _stages(chunks: Sequence[str]) -> tuple[PipelineStage, ...]:
    found, index = [], 0
    for chunk in chunks:
        count = chunk.count("t")
        found.append(PipelineStage("E" in chunk, tuple(range(index, index + count)), chunk.count("m"), "L" in chunk))
        index += count
    return tuple(found)


def write(stages: Sequence[str]) -> str:
    """The shortest usual notation of stages given as symbols written out."""
    text = ""
    remaining = len(stages)
    for chunk, run in groupby(stages):
        count = len(list(run))
        remaining -= count
        symbols = "".join(_repeated(symbol, len(list(same))) for symbol, same in groupby(chunk))
        repeats = count if remaining else count - 1
        text += f"({symbols}|)*{repeats}" if repeats > 1 else f"{symbols}|" * repeats
        text += "" if remaining else symbols
    return text


def _repeated(symbol: str, count: int) -> str:
    return f"{symbol}*{count}" if count > 2 else symbol * count


def max_pipeline(num_layers: int, hash_layers: int) -> int:
    """The largest PP at which every stage has a layer and stage 0 all hash layers."""
    return num_layers - max(1, hash_layers) + 1


@lru_cache(maxsize=1024)
def generate(rules: LayoutRules, weights: StageWeights) -> str:
    """The layout whose fullest stage holds least; among equals the fastest, then the most even one.

    Stage 0 takes all hash layers, every stage at least one layer, the last stage head and MTP.
    """
    pp, layers = rules.pipeline, rules.num_layers
    first_min = max(1, min(rules.hash_layers, layers))
    if not 1 <= pp <= max_pipeline(layers, rules.hash_layers):
        raise UserError(
            f"PP={pp}: {layers} layers with {rules.hash_layers} hash layers in stage 0 allow PP from 1 to"
            f" {max_pipeline(layers, rules.hash_layers)} ({CONFIG})"
        )
    tail = "m" * rules.mtp_layers + "L"
    if pp == 1:
        return write(["E" + "t" * layers + tail])
    last_weight = weights.head + rules.mtp_layers * weights.mtp
    last_time = weights.head_s + rules.mtp_layers * weights.mtp_s

    def unevenness(ends: tuple[int, int]) -> tuple[float, float, float]:
        first, last = ends[0] + weights.embedding, ends[1] + last_weight
        each, more = divmod(layers - sum(ends), pp - 2) if pp > 2 else (0, 0)
        squares = first**2 + last**2 + more * (each + 1) ** 2 + (pp - 2 - more) * each**2
        time = max(ends[0], ends[1] + last_time, each + (more > 0))
        return round(max(first, last, each + (more > 0)), 2), time, squares

    room = layers - (pp - 2)
    choices = ((f, n) for f in range(first_min, room) for n in ([room - f] if pp == 2 else range(1, room - f + 1)))
    first, last = min(choices, key=unevenness)
    middle = _shared(layers - first - last, pp - 2)
    return write(["E" + "t" * first, *("t" * count for count in middle), "t" * last + tail])


def _shared(layers: int, stages: int) -> list[int]:
    """`layers` over `stages` as evenly as it goes, the fuller stages first."""
    if not stages:
        return []
    each, more = divmod(layers, stages)
    return [each + 1] * more + [each] * (stages - more)
