"""What is shown: a plan as text (`table`), for programs (`as_json`), and with its formulas filled in (`explain`)."""
