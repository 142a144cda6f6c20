"""What `tightfit probe` finds out about a machine, and where it is kept."""
