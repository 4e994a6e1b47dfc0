"""The planner: what fits, how big, how long, before any node-hour.

Pure functions over typed inputs. `from_settings` makes a question of a resolved profile, `core.evaluate` answers it,
`verdict` judges the answer, `levers` and `search` answer neighbouring questions, `of_settings` does it all for a
profile at a site. In three rooms, each importing only those before it:

- `counted`: what follows from shapes and sizes, and the constants the formulas take (`coefficients.yaml`, each with its
  unit, source and kind);
- `fitted`: what measured runs say: for which the constants hold, and a site's own in place of the built-in ones;
- `shown`: the answer as text, as JSON, and with its formulas.
"""
