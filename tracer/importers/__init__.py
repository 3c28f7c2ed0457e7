"""Files that other programs write, as rows of the hit analysis: a module a format, and `sniff`."""
