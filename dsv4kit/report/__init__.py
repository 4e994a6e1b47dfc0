"""What a run was, for people who were not there: gathered from its directory, then drawn or written."""
