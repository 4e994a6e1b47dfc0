"""dsv4kit: DeepSeek-V4 post-training on Slurm clusters."""

__version__ = "0.1.0"
