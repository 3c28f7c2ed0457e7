"""Speed, measured side by side. Run with `make bench`; results are kept in README.md."""
