"""What comes before a run: data in the columns verl reads.

`data` starts it and is imported by the control plane; `work` and what it imports run in the trainer's own Python, which
has pyarrow, datasets and transformers: together they are larger than the control plane may be, and where the packages
are those that read the rows in a run, there is no room for a difference.
"""
