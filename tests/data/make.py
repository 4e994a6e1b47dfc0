"""Makes the Parquet files here with pyarrow, which the CPU runtime has and the control plane has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent


def grpo(sources: list[str], truth: Callable[[int], Any]) -> list[dict[str, Any]]:
    """16 rows as verl's preprocessing scripts for RL make them."""
    return [
        {
            "data_source": sources[i % len(sources)],
            "prompt": [{"role": "user", "content": f"What is {i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth(i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(16)
    ]


def main() -> None:
    """Writes all of them."""
    plain = grpo(["math_dapo"], lambda i: "42")
    files: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "grpo": (plain, {}),
        "grpo-two-groups": (
            grpo(["aime2024", "math_dapo"], lambda i: "42"),
            {"row_group_size": 4, "compression": "zstd"},
        ),
        "grpo-unknown-source": (grpo(["my_own"], lambda i: "42"), {}),
        "grpo-empty-truth": (grpo(["math_dapo"], lambda i: "" if i == 5 else "1"), {}),
        "grpo-null-truth": (grpo(["math_dapo"], lambda i: None if i == 5 else "1"), {}),
        "grpo-number-truth": (grpo(["math_dapo"], lambda i: 7), {}),
        "grpo-no-statistics": (plain, {"write_statistics": False}),
        "grpo-text-prompt": ([{**row, "prompt": "What?"} for row in plain], {}),
        "sft": (
            [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}] * 200,
            {},
        ),
    }
    for name, (rows, options) in files.items():
        pq.write_table(pa.Table.from_pylist(rows), HERE / f"{name}.parquet", **options)


if __name__ == "__main__":
    main()
