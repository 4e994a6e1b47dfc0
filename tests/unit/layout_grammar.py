"""Megatron's layout notation read by hand, one character after the other: knows nothing of the kit's own reader."""

from __future__ import annotations


def stages(text: str) -> list[str]:
    """The stages, written out; ValueError for what is not in the notation."""
    written, rest = _sequence(text, closing="")
    if rest:
        raise ValueError(rest)
    return written.split("|")


def _sequence(text: str, closing: str) -> tuple[str, str]:
    written = ""
    while text and text[0] != closing:
        if text[0] == "(":
            unit, text = _sequence(text[1:], ")")
            if text[:1] != ")":
                raise ValueError("not closed")
            text = text[1:]
        elif text[0] in "EtmL|":
            unit, text = text[0], text[1:]
        elif text[0] == ",":
            text = text[1:]
            continue
        else:
            raise ValueError(text)
        digits = ""
        if text[:1] == "*":
            text = text[1:]
            while text[:1].isdigit():
                digits, text = digits + text[0], text[1:]
            if not digits:
                raise ValueError("no count")
        written += unit * int(digits or "1")
    return written, text


def problems(text: str, *, pipeline: int, layers: int, hash_layers: int, mtp: int) -> list[str]:
    """Every rule of Megatron that the layout breaks (one stage per pipeline rank)."""
    found, held = [], stages(text)
    symbols = "".join(held)
    if len(held) != pipeline:
        found.append(f"{len(held)} stages")
    if symbols.count("t") != layers:
        found.append(f"{symbols.count('t')} layers")
    if not symbols.startswith("E") or symbols.count("E") != 1:
        found.append("embedding")
    if not symbols.endswith("L") or symbols.count("L") != 1:
        found.append("head")
    if held[0].count("t") < hash_layers:
        found.append("hash layers")
    if symbols.count("m") != mtp or (mtp and "t" in symbols[symbols.index("m") :]):
        found.append("mtp")
    if any(not stage for stage in held):
        found.append("empty stage")
    return found
