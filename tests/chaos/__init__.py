"""Chaos: a cluster under seeded faults, judged from outside. See ``verdict`` and ``run``."""
