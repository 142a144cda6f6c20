"""What a running job shows and writes: one record per step, a progress bar, a log."""
