"""`dsv4kit prepare model`: is a local model whole and the one a profile counts on; and the proxy of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv4kit import hints
from dsv4kit.cli.arguments import add_variables
from dsv4kit.cli.variables import BY_VERB
from dsv4kit.errors import UserError

HELP = "a local model: whole, and the one a profile counts on; and a proxy of its first layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the action takes."""
    add_variables(parser, BY_VERB["prepare model"])


def run(args: argparse.Namespace) -> int:
    """Checks, one line per finding, and makes the proxy where all is well. Exit status 1 where something is wrong."""
    from dsv4kit.weights import model_check

    if not args.model_path:
        instance = hints.command("prepare model", MODEL_PATH="/shared/DeepSeek-V4-Pro", MODEL="dsv4-pro")
        raise UserError(f"MODEL_PATH is not set; for instance: {instance}")
    directory = Path(args.model_path).absolute()
    if not directory.is_dir():
        raise UserError(f"MODEL_PATH={directory}: no such directory")
    config = model_check.config_of(directory)
    found = list(model_check.shape_problems(config, _geometry(args.model))) if args.model else []
    counts: list[int] = []
    found += model_check.weight_problems(directory, lambda *numbers: counts.extend(numbers))
    found += model_check.tokenizer_problems(directory)
    if args.hashes and not found:
        hashes = model_check.known_hashes(directory, args.hashes)
        found += model_check.hash_problems(directory, hashes, lambda line: print(line, flush=True))
    for problem in found:
        print(f"problem  {problem}")
    if found:
        return 1
    files, tensors, size = counts
    fits = f", as {args.model} has it" if args.model else ""
    print(f"{directory}: {config.get('model_type')}{fits}; {tensors} tensors in {files} files, {size / 1e9:.3g} GB")
    if args.proxy:
        from dsv4kit.weights.proxy import cut_checkpoint

        proxy = Path(args.proxy).absolute()
        cut_checkpoint(directory, proxy, 4, True, lambda line: print(line, flush=True))
        print(f"{proxy}: 4 layers; MODEL_PATH={proxy} trains them")
    return 0


def _geometry(model: str) -> dict[str, object]:
    from dsv4kit.config.loading import geometry_of

    geometry = geometry_of(model)
    if geometry is None:
        raise UserError(f"MODEL={model}: the kit knows no shape of it; without MODEL= the files alone are checked")
    return geometry.model_dump()
