"""The planner: what fits, how big, how long, before any node-hour.

Pure functions over typed inputs (`inputs`); `from_settings` builds those from a resolved profile, `core.evaluate` runs
all of it. Every number that is not arithmetic is in `coefficients.yaml` with its unit, source and kind.
"""
