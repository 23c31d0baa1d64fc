"""From facts to causes: what an exit, an exception or an order of deaths means. Pure: no I/O, no clock."""
