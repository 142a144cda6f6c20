"""Many ranks of one job: starting them, joining those of torchrun and SLURM, and saying why one
failed. Knows no models and no plans."""
