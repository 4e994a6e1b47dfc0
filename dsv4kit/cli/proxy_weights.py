"""`dsv4kit proxy-weights`: the first layers of a released checkpoint, as weights for a proxy run."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.description = (
        "Cuts the first layers out of a released DeepSeek-V4 checkpoint: what MODEL=dsv4-pro-4l and"
        " MODEL=dsv4-flash-4l train. Only the bytes that are kept are read."
    )
    parser.add_argument("--from", dest="source", metavar="DIR", required=True, help="the released checkpoint")
    parser.add_argument("--out", metavar="DIR", required=True, help="the new checkpoint; must not exist")
    parser.add_argument("--layers", metavar="N", default="4", help="layers to keep (default: %(default)s)")
    parser.add_argument(
        "--mtp",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the multi-token-prediction layer, as the proxies' profiles have it",
    )


def run(args: argparse.Namespace) -> int:
    """Cuts, a line per file."""
    from dsv4kit.errors import UserError
    from dsv4kit.weights.proxy import cut_checkpoint

    if not (args.layers.isascii() and args.layers.isdecimal() and len(args.layers) < 6):
        raise UserError(f"--layers={args.layers!r}: not a whole number above 0")
    destination = Path(args.out).absolute()
    cut_checkpoint(
        Path(args.source).absolute(), destination, int(args.layers), args.mtp, lambda line: print(line, flush=True)
    )
    print(f"{destination}: {args.layers} layers; MODEL_PATH={destination} trains them")
    return 0
