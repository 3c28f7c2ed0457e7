"""One rule a file, each with its equation and the smallest log that breaks it; see `docs/rules.md`."""
