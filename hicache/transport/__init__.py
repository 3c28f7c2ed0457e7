"""How ranks meet: one module a mode, all behind `ports.Transport`."""
