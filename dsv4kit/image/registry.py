"""The digest an image has in its registry now, asked without fetching the image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message

from dsv4kit.errors import UserError

# Each prints the digest of the list of all architectures, and uses the logins its user has.
TOOLS = {
    "skopeo": ("inspect", "--format={{.Digest}}", "docker://IMAGE"),
    "crane": ("digest", "IMAGE"),
    "docker": ("buildx", "imagetools", "inspect", "--format={{.Manifest.Digest}}", "IMAGE"),
}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ACCEPTED = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LIMIT_S = 60


def digest(image: str) -> tuple[str, str]:
    """(digest, who said it) of `REGISTRY/REPOSITORY:TAG`. Raises UserError with commands to try elsewhere."""
    tried = []
    for program, words in TOOLS.items():
        if not shutil.which(program):
            tried.append(f"{program}: not installed")
            continue
        said = _told([program, *(word.replace("IMAGE", image) for word in words)])
        if found := _DIGEST.search(said):
            return found[0], program
        tried.append(f"{program}: {said or 'no answer'}")
    try:
        return ask(image), "the registry"
    except (OSError, ValueError) as error:
        tried.append(f"the registry itself: {error}")
    commands = "; ".join(f"{program} {' '.join(words).replace('IMAGE', image)}" for program, words in TOOLS.items())
    raise UserError(f"{image}: its digest could not be had here ({'; '.join(tried)}); where it can, one of: {commands}")


def ask(image: str, scheme: str = "https") -> str:
    """What the registry's own interface says, without a login. Raises OSError or ValueError."""
    host, _, rest = image.partition("/")
    repository, _, tag = rest.partition(":")
    host = "registry-1.docker.io" if host == "docker.io" else host
    request = urllib.request.Request(f"{scheme}://{host}/v2/{repository}/manifests/{tag or 'latest'}", method="HEAD")
    request.add_header("Accept", ", ".join(_ACCEPTED))
    try:
        headers = _headers(request)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        request.add_header("Authorization", f"Bearer {_token(error.headers)}")
        headers = _headers(request)
    found = _DIGEST.fullmatch(headers.get("Docker-Content-Digest", ""))
    if not found:
        raise ValueError("its answer has no digest")
    return found[0]


def _headers(request: urllib.request.Request) -> Message:
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
        headers: Message = answer.headers
        return headers


def _token(headers: Message) -> str:
    """What anybody gets where the registry says that tokens are (`Bearer realm="...",service="...",scope="..."`)."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', headers.get("WWW-Authenticate", "")))
    realm = fields.pop("realm", "")
    if not realm.startswith(("https://", "http://127.0.0.1")):
        raise ValueError("it wants a login")
    with urllib.request.urlopen(f"{realm}?{urllib.parse.urlencode(fields)}", timeout=_LIMIT_S) as answer:
        found = json.load(answer)
    return str(found.get("token") or found["access_token"])


def _told(argv: list[str]) -> str:
    """What a program prints, or the last line of why it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = [line.strip() for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines()]
    return next((line for line in reversed(lines) if line), "")
