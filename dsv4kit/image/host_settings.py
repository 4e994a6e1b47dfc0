"""What this machine needs to reach package indexes, shown to every RUN of a build and left out of the image.

Machines behind a proxy that re-signs TLS, or with an index of their own, say so in pip's settings and in variables.
A Dockerfile must know nothing of it: the files are mounted over the build (`--volume` of buildah and podman).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# pip's settings that say where packages come from, and how.
_CARRIED = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "trusted-host",
    "constraint",
    "proxy",
    "timeout",
    "default-timeout",
    "retries",
)
# In this order; each is used by some program as the file with all certificates.
_CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
# Not /etc/ssl/certs: a package that is installed there during the build could not replace what is mounted.
_CA_INSIDE = "/run/dsv4kit-ca.crt"


def mounts(directory: Path, environ: Mapping[str, str]) -> list[str]:
    """`SRC:DST:ro` for the build; the files made for it lie in `directory`, for this user alone."""
    settings = pip_settings()
    authority = next((environ[name] for name in _CA_VARIABLES if os.path.isfile(environ.get(name, ""))), None)
    authority = settings.pop("cert", None) or authority
    wanted = [f"{path}:{path}:ro" for path in local_paths(settings)]
    if authority and os.path.isfile(authority):
        wanted.append(f"{os.path.realpath(authority)}:{_CA_INSIDE}:ro")
        settings["cert"] = _CA_INSIDE
        git = _private(directory / "gitconfig", f"[http]\n\tsslCAInfo = {_CA_INSIDE}\n")
        wanted.append(f"{git}:/etc/gitconfig:ro")
    if settings:
        lines = [f"{name} = {_indented(value)}" for name, value in settings.items()]
        pip = _private(directory / "pip.conf", "\n".join(["[global]", *lines, ""]))
        wanted.append(f"{pip}:/etc/pip.conf:ro")
    return wanted


def pip_settings(listing: str | None = None) -> dict[str, str]:
    """pip's settings on this machine that a build needs, by their names in pip.conf."""
    if listing is None:
        command = [sys.executable, "-m", "pip", "config", "list"]
        listing = subprocess.run(command, capture_output=True, text=True).stdout
    found: dict[str, str] = {}
    # `global.cert='/x'` of files, `:env:.cert='/x'` of variables, which win and come first.
    for line in reversed(listing.splitlines()):
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:") and name in (*_CARRIED, "cert"):
            found[name.removeprefix("default-")] = str(ast.literal_eval(value))
    return found


def local_paths(settings: Mapping[str, str]) -> list[str]:
    """Directories and files of this machine that the settings name."""
    return sorted(set(_paths(settings)))


def _paths(settings: Mapping[str, str]) -> Iterator[str]:
    for name in ("index-url", "extra-index-url", "find-links", "constraint"):
        for word in settings.get(name, "").split():
            path = word.removeprefix("file://")
            if not path.startswith("/") or not os.path.exists(path):
                continue
            # The pages of an index on disk link to files beside it.
            parent = os.path.dirname(path.rstrip("/"))
            yield parent if name.endswith("index-url") and parent != "/" else path.rstrip("/")


def _indented(value: str) -> str:
    """A value of several words as pip.conf holds a list."""
    words = value.split()
    return value if len(words) < 2 else "\n  " + "\n  ".join(words)


def _private(path: Path, text: str) -> Path:
    """A file for this user alone: an index's address may hold a password."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path
