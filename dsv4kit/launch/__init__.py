"""From a resolved profile to jobs in the queue, and back: run directory, rendering, submission, chain, state."""
