"""What runs on every node of a segment. Standard library and submitit only: the trainer's image brings nothing else."""
