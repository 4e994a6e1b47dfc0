"""What is counted, from a `Question` (`inputs`) and constants: parameters, memory, checkpoints, times and segments.

`checks` are the rules a question has to hold to before any of it means something. No file is read here but the built-in
constants, and nothing is known here of a run that was measured.
"""
