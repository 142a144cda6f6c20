"""The bill: bytes by kind, tier and phase, and the closed forms of model states. No torch."""
