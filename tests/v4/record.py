"""Writes down which names a Megatron-LM and the Megatron-Bridge that goes with it have, so that CI needs no checkout.

    python tests/v4/record.py MEGATRON_LM MEGATRON_BRIDGE SHA

makes tests/data/megatron-SHA.json from the two directories (- for no bridge): of each module that needs.yaml looks at,
its functions and classes, the fields of its classes, and the texts a field's type allows. Names only, no code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dsv4kit.plugin import needs  # noqa: E402

DATA = ROOT / "tests" / "data"


def record(megatron: str, bridge: str, sha: str) -> Path:
    """See the module."""
    places = [Path(megatron)] if bridge == "-" else [Path(megatron), Path(bridge) / "src"]
    inventory = needs.Installed(places)
    names = [n for n in needs.needed_modules("dsv4-pro", "grpo") if n.startswith("megatron.")]
    modules = {name: needs.recorded(module) for name in names if (module := inventory.module(name))}
    path = DATA / f"megatron-{sha}.json"
    rows = [f"{json.dumps(name)}: {json.dumps(module)}" for name, module in modules.items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python tests/v4/record.py MEGATRON_LM MEGATRON_BRIDGE SHA")
    print(record(*sys.argv[1:]))
