"""Logs in, verdict out: which rank left the others first, at which call, because of which local fact."""
