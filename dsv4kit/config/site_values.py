"""What the texts of a site and of the settings may be: they end up in batch scripts, mount lists, Slurm's command line
and imports.

Each function returns its value, or raises ValueError with what is allowed.
"""

from __future__ import annotations

import keyword
import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# pyxis splits its list of mounts at `,` and `:`, and enroot reads each as a line of an fstab.
_UNMOUNTABLE = re.compile(r"[\s,:\"'\\#]")


def line(value: str) -> str:
    """Any text of one line."""
    if _CONTROL.search(value):
        raise ValueError("control characters and line breaks cannot stand here")
    return value


def absolute(value: str) -> str:
    """An absolute path."""
    if not value.startswith("/"):
        raise ValueError("not an absolute path")
    return line(value)


def absolute_or_none(value: str | None) -> str | None:
    """An absolute path, or nothing."""
    return value if value is None else absolute(value)


def image(value: str | None) -> str | None:
    """An image pyxis reads from a file on every node.

    It takes any text that does not begin with `/` for the name of one in a registry, which every node would download.
    """
    if value is None:
        return None
    if not value.startswith("/"):
        raise ValueError("pyxis would look for this in a registry; the absolute path of a .sqsh file is needed")
    if not value.endswith((".sqsh", ".sqfs", ".squashfs")):
        raise ValueError("not a squashfs file by its name; .sqsh, .sqfs and .squashfs are")
    return line(value)


def mountable(path: str) -> str:
    """A path that can stand in a list of mounts."""
    if found := _UNMOUNTABLE.search(absolute(path)):
        raise ValueError(f"a path with {found[0]!r} cannot be mounted into a container")
    return path


def mount(value: str) -> str:
    """SRC, SRC:DST or SRC:DST:FLAGS."""
    source, *rest = value.split(":")
    mountable(source)
    if rest:
        mountable(rest[0])
    if len(rest) > 2 or (len(rest) == 2 and not re.fullmatch(r"[a-z][a-z0-9_=+-]*", rest[1])):
        raise ValueError("not SRC, SRC:DST or SRC:DST:FLAGS; several flags are joined by +, as in ro+rprivate")
    return value


def variable(name: str) -> str:
    """A name the shell can export."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("not the name of an environment variable: letters, digits and _, no digit first")
    return name


def module(name: str) -> str:
    """The dotted name of a Python module."""
    if not all(part.isidentifier() and part.isascii() and not keyword.iskeyword(part) for part in name.split(".")):
        raise ValueError("not the name of a Python module; verl.trainer.main_ppo is one")
    return name


def function_file(value: str | None) -> str | None:
    """A Python file, or `pkg://module`."""
    if value is None:
        return None
    if value.startswith("pkg://"):
        module(value.removeprefix("pkg://"))
        return value
    if not value.startswith("/"):
        raise ValueError("neither the absolute path of a Python file nor pkg://module")
    return line(value)


def slurm_name(value: str) -> str:
    """A partition, account, QOS or reservation, or a comma-separated list of them."""
    if not re.fullmatch(r"[\w.,@+:-]+", value):
        raise ValueError("not a name of Slurm's: letters, digits and . , @ + : _ - may stand in it")
    return value


def nodes(value: str | None) -> str | None:
    """A list of nodes in Slurm's notation."""
    if value is not None and not re.fullmatch(r"[\w.,-]+(\[[\d,-]+\][\w.,-]*)*", value):
        raise ValueError("not a list of nodes as Slurm writes it; node[3-5],node9 is one")
    return value


def option(value: str) -> str:
    """A whole sbatch option, as it is written after `#SBATCH`."""
    if not value.startswith("-"):
        raise ValueError("not an sbatch option; --constraint=a100 is one")
    return line(value)


def version(value: str | None) -> str | None:
    """A version of Slurm."""
    if value is not None and not re.fullmatch(r"\d\d\.\d\d(\.\d+)?", value):
        raise ValueError("not a version of Slurm; 24.05.4 is one (in quotes, or YAML reads a number)")
    return value
