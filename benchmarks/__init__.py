"""What the design promises, measured: `make bench`. Medians of several runs; on a busy machine read the ratios."""
