"""The instrumented HiCache runtime: what each rank decides, meets, moves and hears, written down."""
