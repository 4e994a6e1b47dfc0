"""Everything installed in an image, as its package managers say it: `inventory.json`, written at the end of the build.

What is made of it outside (`image.sbom`) needs libraries that do not belong into an image that trains.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

NAME = "inventory.json"
_FIELDS = ("Package", "Version", "Architecture", "source:Package")


def take() -> dict[str, Any]:
    """`distribution` (ID, VERSION_ID), `python` and `system`: packages by name, each with its version and more."""
    return {"distribution": _distribution(), "python": python_packages(), "system": system_packages()}


def python_packages() -> list[dict[str, str]]:
    """Name, version, licence as its own metadata has it, home page; of one that stands twice, what is imported."""
    found: dict[str, dict[str, str]] = {}
    for installed in importlib.metadata.distributions():
        about: Any = installed.metadata  # an email.message.Message, which its type does not say
        if about["Name"]:
            name = about["Name"].lower().replace("_", "-").replace(".", "-")
            entry = {"name": name, "version": installed.version}
            if licence := about.get("License-Expression"):
                entry["expression"] = licence
            elif named := _licence(about.get("License"), about.get_all("Classifier") or []):
                entry["licence"] = named
            if home := about.get("Home-page"):
                entry["home"] = home
            found.setdefault(name, entry)
    return [found[name] for name in sorted(found)]


def _licence(text: str | None, classifiers: list[str]) -> str:
    """A short text: some packages have the whole licence in that field."""
    named = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License ::")]
    short = text.strip() if text and "\n" not in text.strip() and len(text) < 100 else ""
    return ", ".join(named) or short


def system_packages() -> list[dict[str, str]]:
    """Name, version, architecture and source package of everything dpkg has installed; none without dpkg."""
    form = "\t".join(f"${{{field}}}" for field in ("db:Status-Abbrev", *_FIELDS))
    try:
        done = subprocess.run(["dpkg-query", "-W", f"-f={form}\n"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    keys = ("name", "version", "architecture", "source")
    return [dict(zip(keys, row[1:], strict=True)) for row in rows if row[0].startswith("ii")]


def _distribution(release: Path = Path("/etc/os-release")) -> dict[str, str]:
    try:
        lines = release.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    known = {name: value.strip("\"'") for name, _, value in (line.partition("=") for line in lines)}
    return {"id": known.get("ID", ""), "version": known.get("VERSION_ID", "")}
