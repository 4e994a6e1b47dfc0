"""What the image's checks say inside the CPU runtime: python probe_image.py OUT."""

import json
import sys
from pathlib import Path

from dsv4kit.image import probes

found = {
    "features": {row: list(probes.feature_problems(row)) for row in ("0.9.1", "main-2026-08", "main-2026-10")},
    "profiles": {
        "cpu": probes.profile_problems("cpu", "grpo", "0.9.1", "cpu"),
        "sft": probes.profile_problems("gb300", "sft", "0.9.1", "cuda"),
        "grpo": probes.profile_problems("h200", "grpo", "0.9.1", "cuda"),
        "another verl": probes.profile_problems("gb300", "sft", "main-2026-08", "cuda"),
    },
}
Path(sys.argv[1]).write_text(json.dumps(found))
