"""From two ranks' logs of a real server to a test file that parts them again, in SGLang's own code.

    logs -> where the two part -> steps of a scheduler, and what went otherwise on one -> a file of its own

`script` reads steps out of one log, `parting` finds where two logs part and why, `write` makes the file;
`body` is what stands in every such file. What the logs do not tell is said; no step is made up.
"""
