"""What a rank decides. Deterministic: no clock, no chance, no torch; everything else comes through a port."""
