"""Makes a plan true on tensors: one file per technique, `apply.py` applies them in order."""
