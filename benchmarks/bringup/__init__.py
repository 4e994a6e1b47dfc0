"""From the start of a job to the driver's first line of work: `make bench-bringup`.

The kit beside reimplementations, written for this benchmark, of what people do today to bring Ray up on Slurm.
"""
